"""Operators that write into parts of a tensor; PyTorch computes them and their gradients.

onnxruntime 1.19.2 and torch's exporter have these faults:

- ``scatter_add``: the gradient of the tensor that is added to is zero at each place where something is added.
- ``index_add`` and ``index_put(accumulate=True)``: of several values for one place only one is added.
- ``scatter_reduce``: ONNX Runtime aborts the process while it builds the gradient. Means and ``include_self=False`` are
  not exported.
- ``index_put``: a value that is broadcast, or what a mask assigns, fails when it is computed; so does what is assigned
  behind dimensions that are taken whole (``x[..., [0, 3]]``).
- ``index_copy``, ``index_fill`` and ``fill_diagonal_``: the exporter fails.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.mends import exporters
from ortlaunch.ort.mends.torch_nodes import torch_node

_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
_MOST_INDICES = 4


@torch_node("Tensor base, Tensor values, int dim, Tensor index", differentiable=(0, 1))
def _scatter_add(base: Tensor, values: Tensor, dim: int, index: Tensor) -> Tensor:
    # Only the part of the values that the index covers is used, but torch differentiates equal shapes only.
    return base.scatter_add(dim, index, values[tuple(slice(size) for size in index.shape)])


@torch_node("Tensor base, Tensor values, int dim, Tensor index, int how, bool include_self", differentiable=(0, 1))
def _scatter_reduce(base: Tensor, values: Tensor, dim: int, index: Tensor, how: int, include_self: bool) -> Tensor:
    covered = values[tuple(slice(size) for size in index.shape)]
    return base.scatter_reduce(dim, index, covered, _REDUCTIONS[how], include_self=include_self)


@torch_node("Tensor base, Tensor values, int dim, Tensor index", differentiable=(0, 1))
def _index_add(base: Tensor, values: Tensor, dim: int, index: Tensor) -> Tensor:
    return base.index_add(dim, index, values)


@torch_node("Tensor base, Tensor values, int dim, Tensor index", differentiable=(0, 1))
def _index_copy(base: Tensor, values: Tensor, dim: int, index: Tensor) -> Tensor:
    return base.index_copy(dim, index, values)


@torch_node("Tensor base, Tensor value, int dim, Tensor index", differentiable=(0, 1))
def _index_fill(base: Tensor, value: Tensor, dim: int, index: Tensor) -> Tensor:
    return base.index_fill(dim, index, value)


@torch_node("Tensor base, Tensor value, bool wrap", differentiable=(0,))
def _fill_diagonal(base: Tensor, value: Tensor, wrap: bool) -> Tensor:
    return base.clone().fill_diagonal_(float(value), wrap)


_FOUR = "Tensor one, Tensor two, Tensor three, Tensor four"


@torch_node(f"Tensor base, Tensor values, {_FOUR}", differentiable=(0, 1))
def _index_accumulate(base: Tensor, values: Tensor, one: Tensor, two: Tensor, three: Tensor, four: Tensor) -> Tensor:
    return _put(base, values, [one, two, three, four], accumulate=True)


@torch_node(f"Tensor base, Tensor values, {_FOUR}", differentiable=(0, 1))
def _index_put(base: Tensor, values: Tensor, one: Tensor, two: Tensor, three: Tensor, four: Tensor) -> Tensor:
    return _put(base, values, [one, two, three, four], accumulate=False)


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


def register() -> None:
    """Registers the symbolics; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    for name, symbolic in _SYMBOLICS.items():
        register_custom_op_symbolic(name, symbolic, 17)


def _scatter_add_symbolic(g: Any, base: Any, dim: Any, index: Any, values: Any) -> Any:
    return _scatter_add(g, base, values, dim, index)


def _scatter_reduce_symbolic(
    g: Any, base: Any, dim: Any, index: Any, values: Any, reduction: Any, include_self: Any
) -> Any:
    from torch.onnx import symbolic_helper

    how = _REDUCTIONS.index(symbolic_helper._get_const(reduction, "s", "reduce"))
    return _scatter_reduce(g, base, values, dim, index, how, include_self)


def _index_add_symbolic(g: Any, base: Any, dim: Any, index: Any, values: Any, alpha: Any = None) -> Any:
    if alpha is not None:
        values = exporters.symbolic("aten::mul")(g, values, _like(g, alpha, base))
    return _index_add(g, base, values, dim, index)


def _index_copy_symbolic(g: Any, base: Any, dim: Any, index: Any, values: Any) -> Any:
    return _index_copy(g, base, values, dim, index)


def _index_fill_symbolic(g: Any, base: Any, dim: Any, index: Any, value: Any) -> Any:
    return _index_fill(g, base, _like(g, value, base), dim, index)


def _fill_diagonal_symbolic(g: Any, base: Any, value: Any, wrap: Any = False) -> Any:
    return _fill_diagonal(g, base, _like(g, value, base), wrap)


def _index_put_symbolic(g: Any, base: Any, indices: Any, values: Any, accumulate: Any = False) -> Any:
    from torch.onnx import errors, symbolic_helper

    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if not symbolic_helper._parse_arg(accumulate, "b"):
        ranks = _rank(g, 0, base), _rank(g, 2, values)
        is_broadcast = 1 in (g.original_node.inputsAt(2).type().sizes() or ())
        if len(given) > _MOST_INDICES or None in ranks or _are_whole(given, *ranks, is_broadcast):
            return exporters.symbolic("aten::index_put")(g, base, indices, values, accumulate)
        return _index_put(g, base, values, *_four(g, given), dims=[None] * ranks[0])
    if len(given) > _MOST_INDICES:
        raise errors.SymbolicValueError(f"index_put with accumulate takes at most {_MOST_INDICES} indices here", base)
    return _index_accumulate(g, base, values, *_four(g, given))


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


def _like(g: Any, number: Any, like: Any) -> Any:
    from torch.onnx import _type_utils

    return g.op("Cast", number, to_i=_type_utils.JitScalarType.from_value(like).onnx_type())


_SYMBOLICS = {
    "aten::scatter_add": _scatter_add_symbolic,
    "aten::scatter_reduce": _scatter_reduce_symbolic,
    "aten::index_add": _index_add_symbolic,
    "aten::index_copy": _index_copy_symbolic,
    "aten::index_fill": _index_fill_symbolic,
    "aten::fill_diagonal": _fill_diagonal_symbolic,
    "aten::index_put": _index_put_symbolic,
}
