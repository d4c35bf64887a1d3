"""Assignments into parts of a tensor, where neither the exporter nor a call of PyTorch will do.

- ``index_put(accumulate=True)``: of several values for one place only one is added.
- ``index_put``: a value that is broadcast, or what a mask assigns, fails when it is computed; so does what is assigned
  behind dimensions that are taken whole (``x[..., [0, 3]]``).
- ``fill_diagonal_``: the exporter fails.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.mends import exporters
from ortlaunch.ort.mends.torch_nodes import torch_node
from ortlaunch.ort.mends.values import cast

_MOST_INDICES = 4


@torch_node("Tensor base, Tensor value, bool wrap", differentiable=(0,))
def _fill_diagonal(base: Tensor, value: Tensor, wrap: bool) -> Tensor:
    return base.clone().fill_diagonal_(float(value), wrap)


@torch_node(
    "Tensor base, Tensor values, Tensor one, Tensor two, Tensor three, Tensor four, bool accumulate",
    differentiable=(0, 1),
)
def _index_put(base: Tensor, values: Tensor, *given: Any) -> Tensor:
    *indices, accumulate = given
    return _put(base, values, indices, accumulate=accumulate)


def _put(base: Tensor, values: Tensor, given: list[Tensor], *, accumulate: bool) -> Tensor:
    """Puts values to indices; a floating-point number stands for a dimension without an index."""
    # An ATen node passes booleans as uint8, which torch takes for a mask as well, with a warning.
    indices = [x.bool() if x.element_size() == 1 else None if x.is_floating_point() else x for x in given[: base.dim()]]
    # A mask stands for several dimensions.
    while indices and indices[-1] is None:
        indices.pop()
    if all(x is not None and x.dtype != torch.bool for x in indices):
        # The exporter writes ``x[:, 3] = y`` so, with a dimension of size 1 that y does not have.
        places = torch.broadcast_shapes(*(x.shape for x in indices if x is not None))
        shape = (*places, *base.shape[len(indices) :])
        values = values.reshape(shape) if values.numel() == math.prod(shape) else values
    # Not the method, which takes no None.
    result: Tensor = torch.ops.aten.index_put(base, indices, values, accumulate)
    return result


def _fill_diagonal_symbolic(g: Any, base: Any, value: Any, wrap: Any = False) -> Any:
    return _fill_diagonal(g, base, cast(g, value, base), wrap)


def _index_put_symbolic(g: Any, base: Any, indices: Any, values: Any, accumulate: Any = False) -> Any:
    from torch.onnx import errors, symbolic_helper

    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    accumulates = bool(symbolic_helper._parse_arg(accumulate, "b"))
    if not accumulates:
        ranks = _rank(g, 0, base), _rank(g, 2, values)
        is_broadcast = 1 in (g.original_node.inputsAt(2).type().sizes() or ())
        if len(given) > _MOST_INDICES or None in ranks or _are_whole(given, *ranks, is_broadcast):
            return exporters.symbolic("aten::index_put")(g, base, indices, values, accumulate)
        return _index_put(g, base, values, *_four(g, given), accumulates, dims=[None] * ranks[0])
    if len(given) > _MOST_INDICES:
        raise errors.SymbolicValueError(f"index_put with accumulate takes at most {_MOST_INDICES} indices here", base)
    return _index_put(g, base, values, *_four(g, given), accumulates)


def _rank(g: Any, index: int, value: Any) -> Any:
    """Returns the dimensions of an argument, which its value in ONNX's graph need not know."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._get_tensor_rank(value)
    return g.original_node.inputsAt(index).type().dim() if known is None else known


def _four(g: Any, given: list[Any]) -> list[Any]:
    """Returns the indices, with a floating-point number where there is none; see `_put`."""
    from torch.onnx import symbolic_helper

    padded = [*given, *[None] * (_MOST_INDICES - len(given))]
    nothing = g.op("Constant", value_t=torch.tensor(0.0))
    return [nothing if one is None or symbolic_helper._is_none(one) else one for one in padded]


def _are_whole(indices: list[Any], base_rank: int, value_rank: int, is_broadcast: bool) -> bool:
    """Whether the exporter's ScatterND writes what is assigned: it broadcasts one number, or nothing."""
    from torch.onnx import symbolic_helper

    given = [index for index in indices if not symbolic_helper._is_none(index)]
    if not given:
        # The exporter writes a `copy_` so.
        return True
    if any(index.type().scalarType() == "Bool" for index in given) or len(given) < len(indices):
        return False
    places = max((symbolic_helper._get_tensor_rank(index) or 0) for index in given)
    return value_rank == 0 or (value_rank == places + base_rank - len(given) and not is_broadcast)


SYMBOLICS = {"aten::fill_diagonal": _fill_diagonal_symbolic, "aten::index_put": _index_put_symbolic}
