"""What is proven of an exported graph by running it beside the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto

from ortlaunch.base.errors import RequestError
from ortlaunch.export import beside, graph
from ortlaunch.export.forward import Forward, shorter, untouched
from ortlaunch.export.names import Names
from ortlaunch.models.task import Batch
from ortlaunch.ort.runtime import Graph
from ortlaunch.ort.verify.compare import relative_error, tolerance_of
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.trace import TraceWarning

_NOISE = 0.05
"""Of a tensor's spread: enough to see in the outputs, little enough to stay in the range of trained weights."""


@dataclass
class Proofs:
    """What was found."""

    parameters: int = 0
    """Parameters that are there under their own names, none of them folded."""
    largest_error: float = 0.0
    """Of any output in any trial, over the output's largest value."""
    shapes: list[list[int]] = field(default_factory=list)
    """Of the first input in each trial."""
    dropout: list[float] = field(default_factory=list)
    """Rate of each Dropout in train mode."""
    batch_norms: int = 0
    """BatchNorms that compute with the batch's own statistics."""


class _Counting(Reference):
    """Counts the dropouts that would have been active."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int | None = 0
        """None where it cannot be known from outside."""

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
    """Within it, PyTorch's dropout passes everything on, and everything else stays in train mode."""
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
    """Runs graph and model in train mode, with the same weights and with others, on batches of several sizes.

    Args:
        model: in train mode; left as it was.
        forward: how it is called.
        batches: the first one is what the graph was traced with.
        exported: the graph, in memory.
        names: what it has of the model.
        warned: statements that the trace has made constants of.
        folder: where the weights lie that the graph has not itself.

    Raises:
        RequestError: they differ, or dropout or BatchNorm is not in train mode in the graph.
    """
    found = Proofs(parameters=len(names.parameters))
    counting = _Counting()
    with untouched(model), torch.no_grad(), counting:
        forward(model, batches[0])
    found.dropout = graph.active_dropout(exported)
    if counting.count is not None and counting.count != len(found.dropout):
        raise RequestError(
            f"the export has {len(found.dropout)} active dropouts, and the model has {counting.count} in train mode"
        )
    found.batch_norms = _batch_norms(model, exported)
    quiet = graph.with_statistics(graph.without_dropout(exported))
    _compare_trials(found, model, forward, _trials(batches), beside.runnable(quiet, folder), warned)
    with _other_weights(model, names):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        others = {name: tensors[name].detach().numpy() for name in (*names.parameters, *names.buffers)}
        # Batch statistics are used where these running ones, which are others, make no difference.
        _compare_trials(found, model, forward, [batches[1]], beside.runnable(quiet, folder, others), warned)
    if found.dropout:
        _check_random(beside.runnable(exported, folder), batches[0])
    return found


def prove_inference(
    model: torch.nn.Module, forward: Forward, batches: list[Batch], path: Path, warned: list[TraceWarning]
) -> Proofs:
    """Runs a file and the model in eval mode on batches of several sizes.

    Raises:
        RequestError: they differ.
    """
    found = Proofs()
    trials = _trials(batches)
    trials.append({name: tensor[:1] for name, tensor in batches[1].items()})
    _compare_trials(found, model, forward, trials, Graph(path), warned)
    return found


def largest_error(outputs: NamedTensors, expected: NamedTensors) -> tuple[float, str, bool]:
    """The largest relative error, the output that has it, and whether one is more than rounding explains."""
    worst, name, differs = 0.0, "", False
    for one, tensor in expected.items():
        error = relative_error(outputs[one], tensor) if one in outputs else None
        error = float("inf") if error is None else error
        differs = differs or error > tolerance_of(tensor)
        if error >= worst:
            worst, name = error, one
    return worst, name, differs


def _trials(batches: list[Batch]) -> list[Batch]:
    """The batch of the trace, another of more samples, fewer, and shorter sequences."""
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
    """The lines that the trace made constants of."""
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
    """Within it, all parameters are others, and the graph's buffers: a graph with one folded away would not follow."""
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
                # Upwards only, so that variances stay positive.
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
