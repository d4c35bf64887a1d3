"""Converts what an ORTModule's graph returns to what the model returns in eager training, and moves its buffers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ortlaunch.ort.refusal import refusal
from ortlaunch.ort.tracing import buffers, decisions, statistics
from ortlaunch.ort.tracing.decisions import Decisions

_PREFIX = "_original_module."
"""What the graph's names of parameters and buffers begin with."""


@dataclass
class Outputs:
    """ORTModule's schema of the model's outputs, with further facts about them."""

    schema: Any
    dtypes: list[torch.dtype]
    """Types of the model's flat outputs in eager; ONNX Runtime's CPU provider returns fp32 for some fp16 outputs."""
    batch_norms: list[str]
    """Modules whose batch statistics follow the outputs, with a mean and a variance each."""
    buffers: list[str] = field(default_factory=list)
    """The buffers whose new values follow the statistics."""
    decisions: Decisions = field(default_factory=Decisions)
    """Values that the trace has frozen; what they are in a step follows the buffers."""
    rates: list[float] = field(default_factory=list)
    """The rates of dropout in the trace, in the order of its calls."""

    def keep_values_before(self, model: torch.nn.Module, kept: dict[str, Tensor]) -> None:
        """Copies the buffers that a forward is about to move."""
        for name in (*statistics.buffers_of(model, self.batch_norms), *self.buffers):
            kept.setdefault(name, model.get_buffer(name).clone())


_UNKNOWN = "Unsupported flatten data type: "
"""What ORTModule's error for a value that it does not know begins with."""


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _unknown(kind: str) -> Exception:
    return refusal(
        f"the model returns a value of {kind}, which ONNX Runtime's graph cannot: return tensors, numbers and texts in "
        "a tuple, a list, a dict or a named tuple, or use backend=eager or backend=compile"
    )


_values_before: ContextVar[dict[str, Tensor] | None] = ContextVar("_values_before", default=None)
"""Where the values of buffers go before a graph's forward moves them; None if nobody needs them."""


@contextlib.contextmanager
def values_before() -> Iterator[dict[str, Tensor]]:
    """Collects what each buffer that a forward moves meanwhile was before, by its name in the exported model."""
    collected: dict[str, Tensor] = {}
    token = _values_before.set(collected)
    try:
        yield collected
    finally:
        _values_before.reset(token)


def install() -> None:
    """Makes ORTModule accept `Outputs` in place of its schema; repeated calls do nothing."""
    from onnxruntime.training.ortmodule import _io
    from onnxruntime.training.ortmodule._graph_transition_manager import PostExportProcessedModelInfo

    if hasattr(PostExportProcessedModelInfo, "_ortlaunch_restore"):
        return
    original = PostExportProcessedModelInfo.restore_outputs

    def restore(self: Any, ort_flatten_outputs: Sequence[Tensor]) -> Any:
        expected: Outputs = self.module_forward_output_schema
        count = len(expected.dtypes)
        moved = count + 2 * len(expected.batch_norms)
        rest = moved + len(expected.buffers)
        model = self._flattened_module._original_module
        if expected.decisions.compare(ort_flatten_outputs[rest:]):
            before: dict[str, Tensor] = {}
            expected.keep_values_before(model, before)
            decisions.keep(before)
        if (kept := _values_before.get()) is not None:
            expected.keep_values_before(model, kept)
        if expected.batch_norms:
            statistics.update(model, expected.batch_norms, ort_flatten_outputs[count:moved])
        if expected.buffers:
            buffers.update(model, expected.buffers, ort_flatten_outputs[moved:rest])
        outputs = zip(ort_flatten_outputs[:count], expected.dtypes, strict=True)
        flat = [x if x.dtype is dtype else x.to(dtype) for x, dtype in outputs]
        self.module_forward_output_schema = expected.schema
        try:
            return original(self, flat)
        finally:
            self.module_forward_output_schema = expected

    extract = _io.extract_data_and_schema

    def extracted(data: Any, constant_as_tensor: bool = False, device: Any = None) -> Any:
        """Leaves Python's numbers in the schema: as tensors they would be outputs that no operator computes."""
        with warnings.catch_warnings():
            # Each text and number among the outputs is called an input.
            warnings.simplefilter("ignore", UserWarning)
            # In a trace a size holds tensors, for which ORTModule's schema of it has no place.
            if any(_is_size(leaf) for leaf in pytree.tree_leaves(data, is_leaf=_is_size)):
                raise _unknown(repr(torch.Size))
            try:
                return extract(data, device=device)
            except TypeError as error:
                kind = str(error).partition(_UNKNOWN)[2]
                if not kind:
                    raise
                raise _unknown(kind) from error

    _io.extract_data_and_schema = extracted
    construct = PostExportProcessedModelInfo.construct_inputs

    def inputs(self: Any, *args: Any) -> Any:
        result = construct(self, *args)
        moved = [f"{_PREFIX}{name}" for name in self.module_forward_output_schema.buffers]
        # The backward reads what the forward has read, and by then the buffers have moved.
        return result | {name: result[name].clone() for name in moved if name in result} if moved else result

    PostExportProcessedModelInfo.restore_outputs = PostExportProcessedModelInfo._ortlaunch_restore = restore
    PostExportProcessedModelInfo.construct_inputs = inputs
