"""Operators that write into parts of a tensor; PyTorch computes them and their gradients.

onnxruntime 1.19.2 and torch's exporter have these faults:

- ``scatter_add``: the gradient of the tensor that is added to is zero at each place where something is added.
- ``index_add`` and ``index_put(accumulate=True)``: of several values for one place only one is added.
- ``scatter_reduce``: ONNX Runtime aborts the process while it builds the gradient. Means and ``include_self=False`` are
  not exported.
- ``index_copy`` and ``index_fill``: the exporter fails.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

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


@torch_node("Tensor base, Tensor values, Tensor? one, Tensor? two, Tensor? three, Tensor? four", differentiable=(0, 1))
def _index_accumulate(
    base: Tensor,
    values: Tensor,
    one: Tensor | None,
    two: Tensor | None,
    three: Tensor | None,
    four: Tensor | None,
) -> Tensor:
    indices = [one, two, three, four][: base.dim()]
    # An ATen node passes booleans as uint8, which torch takes for a mask as well, with a warning.
    masks = [x.bool() if x is not None and x.element_size() == 1 else x for x in indices]
    while masks and masks[-1] is None:
        masks.pop()
    return base.index_put(tuple(masks), values, accumulate=True)  # type: ignore[arg-type]


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
    from torch.onnx import symbolic_opset9

    if alpha is not None:
        values = symbolic_opset9.mul(g, values, _like(g, alpha, base))
    return _index_add(g, base, values, dim, index)


def _index_copy_symbolic(g: Any, base: Any, dim: Any, index: Any, values: Any) -> Any:
    return _index_copy(g, base, values, dim, index)


def _index_fill_symbolic(g: Any, base: Any, dim: Any, index: Any, value: Any) -> Any:
    return _index_fill(g, base, _like(g, value, base), dim, index)


def _index_put_symbolic(g: Any, base: Any, indices: Any, values: Any, accumulate: Any = False) -> Any:
    from torch.onnx import errors, symbolic_helper, symbolic_opset11

    if not symbolic_helper._parse_arg(accumulate, "b"):
        return symbolic_opset11.index_put(g, base, indices, values, accumulate)
    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    if len(given) > _MOST_INDICES:
        raise errors.SymbolicValueError(f"index_put with accumulate takes at most {_MOST_INDICES} indices here", base)
    given = [None if symbolic_helper._is_none(index) else index for index in given]
    return _index_accumulate(g, base, values, *given, *[None] * (_MOST_INDICES - len(given)))


def _like(g: Any, number: Any, like: Any) -> Any:
    from torch.onnx import _type_utils

    return g.op("Cast", number, to_i=_type_utils.JitScalarType.from_value(like).onnx_type())


_SYMBOLICS = {
    "aten::scatter_add": _scatter_add_symbolic,
    "aten::scatter_reduce": _scatter_reduce_symbolic,
    "aten::index_add": _index_add_symbolic,
    "aten::index_copy": _index_copy_symbolic,
    "aten::index_fill": _index_fill_symbolic,
    "aten::index_put": _index_put_symbolic,
}
