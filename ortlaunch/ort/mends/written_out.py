"""Calls that torch's exporter lacks, written with operators that it has while ORTModule traces a model.

- ``hsplit``, ``vsplit``, ``dsplit`` and ``tensor_split``: slices, whose ends follow the sizes of a batch. The exporter
  has ``tensor_split`` alone, and ORTModule's inference of shapes stops at it where the split size varies.
- ``sum_to_size``: a sum over the dimensions that are to be 1; the exporter takes no sizes of the batch.
- ``x.data``: ``x.detach()``, and ``x.data = y`` writes into it. The tracer does not see where it comes from, and would
  make its values a constant.
- Another tensor of a parameter's memory, such as an attribute ``weight.data``: the parameter, detached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ortlaunch.ort.mends.gradients import tensors
from ortlaunch.ort.mends.side_effects import address_of

_SPLIT = (torch.tensor_split, Tensor.tensor_split)
_ALONG = {torch.hsplit: 1, Tensor.hsplit: 1, torch.vsplit: 0, Tensor.vsplit: 0, torch.dsplit: 2, Tensor.dsplit: 2}
"""Functions that split along a dimension of their own."""
_CONSTANTS = ("prim::Constant", "aten::lift_fresh")
"""What makes a tensor of which the tracer does not see where it comes from; the second one also from NumPy."""


class WritesOut(TorchFunctionMode):
    """Replaces these calls in a trace."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = {one.data_ptr(): one for one in model.parameters() if address_of(one)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch._C._get_tracing_state() is None:
            return func(*args, **named)
        # The other modes would be asked for each attribute.
        with torch._C.DisableTorchFunction():
            if any(map(self._is_of_a_parameter, tensors((args, named)))):
                args, named = tree_map_only(Tensor, self._traced, (args, named))
        if func is Tensor.sum_to_size:
            return _summed(*args, **named)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__ and _is_alike(*args):  # type: ignore[attr-defined]
            return args[0].detach().copy_(args[1])
        if func in _SPLIT and not _is_empty(args[0]):
            return _split(*args, **named)
        if func in _ALONG and not _is_empty(args[0]):
            # A vector has one dimension, along which `hsplit` splits.
            where = [*args[1:], *named.values()][0]
            return _split(args[0], where, min(_ALONG[func], args[0].dim() - 1))
        return func(*args, **named)

    def _is_of_a_parameter(self, x: Tensor) -> bool:
        return address_of(x) > 0 and x.data_ptr() in self._parameters

    def _traced(self, x: Tensor) -> Tensor:
        """Returns a parameter, detached, for another tensor of its elements that the tracer does not know."""
        if not self._is_of_a_parameter(x):
            return x
        own = self._parameters[x.data_ptr()]
        is_known = x is own or torch._C._get_value_trace(x).node().kind() not in _CONSTANTS  # type: ignore[attr-defined]
        return x if is_known or not _is_alike(own, x) else own.detach()


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, sizes and strides."""
    # In a trace sizes are tensors, and comparing them a decision.
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _is_empty(x: Tensor) -> bool:
    return x.dim() == 0


def _split(
    x: Tensor, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Tensor, ...]:
    where = next(given for given in (indices_or_sections, sections, indices) if given is not None)
    if isinstance(where, Tensor):
        where = where.tolist()
    places = list(where) if isinstance(where, Sequence) else list(_ends(x.shape[dim], where))
    starts, ends = [0, *places], [*places, None]
    before = (slice(None),) * (dim % x.dim())
    return tuple(x[(*before, slice(start, end))] for start, end in zip(starts, ends, strict=True))


def _ends(size: Any, count: int) -> Iterator[Any]:
    """Yields where all parts but the last one end; the first ones are longer by one where the sizes differ."""
    end = 0
    for index in range(count - 1):
        end = end + (size - index + count - 1) // count
        yield end


def _summed(x: Tensor, *size: Any) -> Tensor:
    wanted = list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)
    extra = x.dim() - len(wanted)
    kept = [extra + at for at, one in enumerate(wanted) if int(one) == 1 and int(x.shape[extra + at]) != 1]
    if kept:
        x = x.sum(kept, keepdim=True)
    return x.sum(list(range(extra))) if extra else x
