"""Finds all operators that make an export fail; the exporter itself names only the first."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from ortlaunch.check.report import Operator
from ortlaunch.data.batch import Batch, mapped, named
from ortlaunch.models.task import Task
from ortlaunch.ort.source import location, place_in_stack, statement_at
from ortlaunch.ort.verify.nested import named_tensors

_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '([^']*)'")
_ROOT = "_original_module"


class _Flat(torch.nn.Module):
    """Adapts a model to the tracer: it takes tensors and returns a tuple of tensors."""

    def __init__(self, model: torch.nn.Module, task: Task, batch: Batch) -> None:
        super().__init__()
        setattr(self, _ROOT, model)
        self._task = task
        self._batch = batch

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        batch = mapped(self._batch, lambda _: next(given))
        return tuple(named_tensors(self._task.outputs(getattr(self, _ROOT), batch)).values())


def unsupported_operators(model: torch.nn.Module, task: Task, batch: Batch, opset: int, error: str) -> list[Operator]:
    """Returns the operators for which the exporter has no symbolic, and one for which ONNX Runtime has no kernel.

    Args:
        model: the plain model; its buffers may change.
        task: how the model is called.
        batch: the batch to trace with.
        opset: version of the ONNX operators.
        error: the error of the export; ONNX Runtime names an operator without a kernel in it.
    """
    found = dict.fromkeys(_without_symbolic(_Flat(model, task, batch), tuple(named(batch).values()), opset))
    if kernel := _NO_KERNEL.search(error):
        module = ".".join(part for part in kernel[2].split("/")[:-1] if part not in ("", _ROOT))
        found[Operator(f"onnx::{kernel[1]}", module, "", "")] = None
    return list(found)


def _without_symbolic(flat: _Flat, inputs: tuple[torch.Tensor, ...], opset: int) -> list[Operator]:
    from torch.onnx import utils

    # With this map the tracer writes each node's module path into its scope.
    utils._setup_trace_module_map(flat, False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph, names = utils.unconvertible_ops(
                flat, inputs, training=torch.onnx.TrainingMode.TRAINING, opset_version=opset
            )
        return [
            _operator(node) for node in graph.nodes() if node.kind() in names and not _is_exported(node.kind(), opset)
        ]
    except Exception:
        # The model cannot be traced either. The error of the export says why.
        return []
    finally:
        utils._reset_trace_module_map()


def _is_exported(kind: str, opset: int) -> bool:
    """Whether there is a symbolic for an operator that ends in "_"; the export looks it up without that character."""
    from torch.onnx._internal import registration

    return kind.endswith("_") and bool(registration.registry.is_registered_op(kind[:-1], opset))


def _operator(node: Any) -> Operator:
    names = [part.partition("::")[2] for part in node.scopeName().split("/")]
    module = ".".join(name for name in names if name not in ("", _ROOT))
    place = place_in_stack(node.sourceRange())
    return (
        Operator(node.kind(), module, location(place), statement_at(*place))
        if place
        else Operator(node.kind(), module, "", "")
    )
