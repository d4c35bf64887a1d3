"""Calls `torch.onnx.export`, and reports what makes it fail."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.check.operators import unsupported_operators
from ortlaunch.export.forward import Forward, untouched
from ortlaunch.models.task import Batch
from ortlaunch.ort import compat
from ortlaunch.ort.operators import symbolics
from ortlaunch.ort.refusal import last_line
from ortlaunch.ort.verify.trace import TraceWarning, trace_warnings

OPSET = 17
"""ORTModule exports with the same version; ONNX Runtime 1.19.2 knows up to 21."""
_MOST = 6


def export_training(model: torch.nn.Module, forward: Forward, batch: Batch, path: Path) -> list[TraceWarning]:
    """Writes the model in train mode: nothing is folded, and parameters keep their names.

    Args:
        model: the model, in train mode; its state is restored.
        forward: how the model is called.
        batch: the batch to trace with.
        path: the file to write; of a graph of 2 GB and more, each weight is written to a file next to it.

    Returns:
        Statements that depended on a tensor's value and are constants in the graph.

    Raises:
        RequestError: the export fails; the message lists the operators and lines that cause it.
    """
    model.train()
    return _export(
        model,
        forward,
        batch,
        path,
        export_params=True,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING,
    )


def export_inference(model: torch.nn.Module, forward: Forward, batch: Batch, path: Path) -> list[TraceWarning]:
    """Writes the model in eval mode, with constants folded; otherwise as `export_training`."""
    model.eval()
    return _export(
        model,
        forward,
        batch,
        path,
        export_params=True,
        do_constant_folding=True,
        training=torch.onnx.TrainingMode.EVAL,
    )


def _export(model: torch.nn.Module, forward: Forward, batch: Batch, path: Path, **arguments: Any) -> list[TraceWarning]:
    inputs = forward.feed(batch)
    with untouched(model), _flat(model, forward), standard_symbolics(), _quietly(), trace_warnings() as warned:
        try:
            torch.onnx.export(
                model,
                tuple(inputs.values()),
                str(path),
                **arguments,
                dynamo=False,
                opset_version=OPSET,
                input_names=list(forward.inputs),
                output_names=list(forward.outputs),
                dynamic_axes=forward.axes,
            )
        except Exception as error:
            refused = error
        else:
            return warned
    raise RequestError(_report(model, forward, batch, refused, warned)) from refused


@contextlib.contextmanager
def _flat(model: torch.nn.Module, forward: Forward) -> Iterator[None]:
    """Makes the model take and return tensors by position, so that names in the graph have no prefix."""
    original, own = model.forward, vars(model).get("forward")

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(forward.inputs, tensors, strict=True))
        count = len(forward.task.by_position)
        by_name = {name: given[name] for name in forward.inputs[count:]}
        named = forward.named(original(*tensors[:count], **by_name))
        return tuple(named[name] for name in forward.outputs)

    model.forward = flat
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


@contextlib.contextmanager
def standard_symbolics() -> Iterator[None]:
    """Leaves only those custom symbolics in the exporter that produce standard ONNX operators.

    An ORTModule in the same process registers its own, which produce operators that a plain runtime does not have.
    """
    # The module name below is that of older torch, which the compatibility layer provides.
    compat.before_import()
    from torch.onnx._internal import registration  # type: ignore[attr-defined]

    groups = registration.registry._registry
    before = {name: dict(group._functions._overrides) for name, group in groups.items()}
    _put(groups, {})
    symbolics.register_standard()
    try:
        yield
    finally:
        _put(groups, before)


def _put(groups: Any, overrides: dict[str, dict[int, Any]]) -> None:
    for name, group in groups.items():
        for opset in list(group._functions._overrides):
            group.remove_custom(opset)
        for opset, function in overrides.get(name, {}).items():
            group.add_custom(function, opset)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences the exporter's deprecation warnings and the warnings of transformers."""
    transformers = logging.getLogger("transformers")
    level = transformers.level
    transformers.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.setLevel(level)


def _report(
    model: torch.nn.Module, forward: Forward, batch: Batch, error: Exception, warned: list[TraceWarning]
) -> str:
    text = str(error)
    lines = [f"the model cannot be exported to ONNX: {last_line(text) or type(error).__name__}"]
    with untouched(model):
        operators = unsupported_operators(model, forward.task, forward.feed(batch), OPSET, text)
    lines += [
        f"unsupported: {one.name} in {one.module or 'the model itself'} {one.location}  {one.statement}".rstrip()
        for one in operators[:_MOST]
    ]
    lines += [f"depends on a tensor's value: {one.location}  {one.statement}" for one in warned[:_MOST]]
    return "\n    ".join(lines)
