"""An ONNX symbolic for ``unflatten`` whose result has a rank that is known before the run.

The exporter's own computes the place of the new dimensions in the graph. ORTModule's shape inference then does not know
the rank, and stops with an assertion.
"""

from __future__ import annotations

from typing import Any

import torch

_END = 2**63 - 1


def _unflatten(g: Any, values: Any, dim: Any, sizes: Any) -> Any:
    """Exports ``values.unflatten(dim, sizes)``; one of the sizes may be -1."""
    from torch.onnx import symbolic_helper

    rank = symbolic_helper._get_tensor_rank(values)
    if rank is None:
        return symbolic_helper._unimplemented("unflatten", "the rank must be known at export time", values)
    axis = symbolic_helper._get_const(dim, "i", "dim") % rank
    shape = g.op("Shape", values)
    before = [_part(g, shape, 0, axis)] if axis else []
    after = [_part(g, shape, axis + 1, _END)] if axis < rank - 1 else []
    return g.op("Reshape", values, g.op("Concat", *before, *_new(g, sizes), *after, axis_i=0))


def _part(g: Any, shape: Any, start: int, end: int) -> Any:
    ends = [g.op("Constant", value_t=torch.tensor([place])) for place in (start, end)]
    return g.op("Slice", shape, *ends)


def _new(g: Any, sizes: Any) -> list[Any]:
    """Returns the new sizes as int64 tensors of rank 1."""
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_packed_list(sizes):
        return [symbolic_helper._unsqueeze_helper(g, size, [0]) for size in symbolic_helper._unpack_list(sizes)]
    numbers = symbolic_helper._get_const(sizes, "is", "sizes")
    return [g.op("Constant", value_t=torch.tensor(list(numbers)))]


SYMBOLICS = {"aten::unflatten": _unflatten}
