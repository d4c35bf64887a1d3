"""Checks an exported graph by running it and the model on the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto

from ortlaunch.base.errors import RequestError
from ortlaunch.export import external_data, graph
from ortlaunch.export.forward import Forward, shorter, untouched
from ortlaunch.export.names import Names
from ortlaunch.models.task import Batch
from ortlaunch.ort.runtime import Graph
from ortlaunch.ort.verify.compare import relative_error, tolerance_of
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.trace import TraceWarning

_NOISE = 0.05
"""Share of a tensor's spread: large enough to change the outputs, and small enough for realistic weights."""


@dataclass
class Proofs:
    """The results of the checks."""

    parameters: int = 0
    """Number of parameters in the graph under their own names."""
    largest_error: float = 0.0
    """Largest error of any output in any trial, over the output's largest value."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shape of the first input in each trial."""
    dropout: list[float] = field(default_factory=list)
    """Rate of each Dropout node in train mode."""
    batch_norms: int = 0
    """Number of BatchNorms that compute with the statistics of the batch."""


class _Counting(Reference):
    """Counts the dropouts that would have been active."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int | None = 0
        """None if the dropouts inside a fused function cannot be counted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.dropped = self.dropped, False
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            if self.dropped:
                hidden = getattr(func, "__name__", "") in ("multi_head_attention_forward", "lstm", "gru")
                self.count = None if hidden or self.count is None else self.count + 1
            self.dropped = self.dropped or before


@contextlib.contextmanager
def dropout_off() -> Iterator[None]:
    """Switches PyTorch's dropout off while everything else stays in train mode."""
    with Reference():
        yield


def prove_training(
    model: torch.nn.Module,
    forward: Forward,
    batches: list[Batch],
    exported: ModelProto,
    names: Names,
    warned: list[TraceWarning],
    folder: Path | None = None,
) -> Proofs:
    """Runs graph and model in train mode on batches of several sizes, with the same weights and with changed ones.

    Args:
        model: the model, in train mode; its state is restored.
        forward: how the model is called.
        batches: the graph was traced with the first one.
        exported: the graph, in memory.
        names: the names of its weights.
        warned: statements that the trace turned into constants.
        folder: the folder of the external data, if any.

    Raises:
        RequestError: the outputs differ, or dropout or BatchNorm is not in train mode in the graph.
    """
    found = Proofs(parameters=len(names.parameters))
    found.dropout = graph.active_dropout(exported)
    _check_count(len(found.dropout), model, forward, batches[0])
    found.batch_norms = _batch_norms(model, exported)
    quiet = graph.with_statistics(graph.without_dropout(exported))
    _compare_trials(found, model, forward, _trials(batches), external_data.runnable(quiet, folder), warned)
    with _other_weights(model, names):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        others = {name: tensors[name].detach().numpy() for name in (*names.parameters, *names.buffers)}
        # The running statistics are changed, too: equal outputs show that the graph uses those of the batch.
        _compare_trials(found, model, forward, [batches[1]], external_data.runnable(quiet, folder, others), warned)
    if found.dropout:
        _check_random(external_data.runnable(exported, folder), batches[0])
    return found


def _check_count(exported: int, model: torch.nn.Module, forward: Forward, batch: Batch) -> None:
    """Refuses a graph that has another number of active dropouts than the model, where they can be counted."""
    counting = _Counting()
    with untouched(model), torch.no_grad(), counting:
        forward(model, batch)
    if counting.count is not None and counting.count != exported:
        raise RequestError(
            f"the export has {exported} active dropouts, and the model has {counting.count} in train mode"
        )


def prove_inference(
    model: torch.nn.Module, forward: Forward, batches: list[Batch], path: Path, warned: list[TraceWarning]
) -> Proofs:
    """Runs a file and the model in eval mode on batches of several sizes.

    Raises:
        RequestError: the outputs differ.
    """
    found = Proofs()
    trials = _trials(batches)
    trials.append({name: tensor[:1] for name, tensor in batches[1].items()})
    _compare_trials(found, model, forward, trials, Graph(path), warned)
    return found


def largest_error(outputs: NamedTensors, expected: NamedTensors) -> tuple[float, str, bool]:
    """Returns the largest relative error, its output, and whether any error is larger than rounding explains."""
    worst, name, differs = 0.0, "", False
    for one, tensor in expected.items():
        error = relative_error(outputs[one], tensor) if one in outputs else None
        error = float("inf") if error is None else error
        differs = differs or error > tolerance_of(tensor)
        if error >= worst:
            worst, name = error, one
    return worst, name, differs


def _trials(batches: list[Batch]) -> list[Batch]:
    """Returns the batch of the trace, a larger one, a smaller one, and one of shorter sequences."""
    longer = {name: torch.cat([batches[1][name], tensor]) for name, tensor in batches[2].items()}
    cut = shorter(batches[1], 1)
    return [batches[0], longer, shorter(batches[2], 0), *([] if cut is batches[1] else [cut])]


def _compare_trials(
    found: Proofs,
    model: torch.nn.Module,
    forward: Forward,
    trials: list[Batch],
    run: Callable[[Batch], NamedTensors],
    warned: list[TraceWarning],
) -> None:
    for batch in trials:
        shape = list(batch[forward.inputs[0]].shape)
        with untouched(model), torch.no_grad(), dropout_off():
            expected = {name: tensor.clone() for name, tensor in forward(model, batch).items()}
        try:
            outputs = run(forward.feed(batch))
        except Exception as error:
            raise RequestError(
                f"the exported graph cannot be run on a batch of {shape}: {error}" + _suspects(warned)
            ) from error
        worst, name, differs = largest_error(outputs, expected)
        if differs:
            raise RequestError(
                f"the exported graph computes another {name} than PyTorch on a batch of {shape}: "
                f"off by {worst:.1e} of its largest value" + _suspects(warned)
            )
        found.largest_error = max(found.largest_error, worst)
        found.shapes.append(shape)


def _suspects(warned: list[TraceWarning]) -> str:
    """Lists the lines that the trace turned into constants, for a message."""
    return "".join(f"\n    depends on a tensor's value: {one.location}  {one.statement}" for one in warned[:6])


def _batch_norms(model: torch.nn.Module, exported: ModelProto) -> int:
    kind = torch.nn.modules.batchnorm._BatchNorm
    expected = sum(isinstance(module, kind) for module in model.modules())
    found = [node for node in graph.nodes(exported) if node.op_type == "BatchNormalization"]
    training = [node for node in found if graph.attribute(node, "training_mode", 0) == 1]
    if len(training) != len(found) or (expected and not found):
        raise RequestError(f"the export has {len(training)} BatchNorms in train mode, and the model has {expected}")
    return len(training)


@contextlib.contextmanager
def _other_weights(model: torch.nn.Module, names: Names) -> Iterator[None]:
    """Changes all parameters, and the buffers in the graph.

    If the graph had folded a weight, its outputs would not change with it.
    The old values are restored.
    """
    buffers = dict(model.named_buffers())
    tensors = [*model.parameters(), *(buffers[name] for name in names.buffers)]
    chosen = [tensor for tensor in tensors if tensor.is_floating_point()]
    before = [tensor.detach().clone() for tensor in chosen]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for tensor in chosen:
                spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
                noise = torch.rand(tensor.shape, generator=generator)
                # Only larger values, so that variances stay positive.
                tensor.add_(noise * _NOISE * (spread or 1.0))
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(chosen, before, strict=True):
                tensor.copy_(value)


def _check_random(run: Graph, batch: Batch) -> None:
    first, second = run(batch), run(batch)
    if all(torch.equal(first[name], second[name]) for name in first):
        raise RequestError("dropout does nothing in the exported graph: two passes over one batch are the same")
