"""Powers, operators on bits, ranges, and parts of a tensor, where neither the exporter nor a call of PyTorch will do.

onnxruntime 1.19.2 adds up the steps of ``arange`` of numbers with a fraction, and their rounding errors. Integers have
no ``&``, ``|``, ``^`` and ``~``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.kernels.traced import number as constant_number
from ortlaunch.ort.mends import exporters, in_part, torch_calls
from ortlaunch.ort.mends.torch_nodes import torch_node
from ortlaunch.ort.mends.values import cast, is_floating, number, sizes

_BITWISE = ("and", "or", "xor")


@torch_node("Tensor like, Tensor start, Tensor end, Tensor step", shape=lambda *_: [None])
def _range(like: Tensor, start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=like.dtype, device=like.device)


def register_range() -> None:
    """Registers the symbolic of ``arange``, which replaces the exporter's in part."""
    in_part.replace("aten::arange", _FractionalRange, _FractionalRange)


def _pow_symbolic(g: Any, base: Any, exponent: Any) -> Any:
    # The exporter's newer one casts nothing.
    return exporters.symbolic("aten::pow", 9)(g, base, exponent)


def cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """Exports ``cumsum``; integers and booleans are added up as int64 like torch does, if no dtype is named."""
    from torch.onnx import _type_utils, symbolic_helper

    if dtype is not None and not symbolic_helper._is_none(dtype):
        kind = _type_utils.JitScalarType(symbolic_helper._get_const(dtype, "i", "dtype"))
        x = g.op("Cast", x, to_i=kind.onnx_type()).setType(x.type().with_dtype(kind.dtype()))
    elif not is_floating(x):
        kind = _type_utils.JitScalarType.INT64
        x = g.op("Cast", x, to_i=kind.onnx_type()).setType(x.type().with_dtype(kind.dtype()))
    axis = symbolic_helper._get_const(dim, "i", "dim")
    return g.op("CumSum", x, g.op("Constant", value_t=torch.tensor(axis)))


def _bitwise_symbolic(name: str, g: Any, one: Any, other: Any) -> Any:
    from torch.onnx import symbolic_helper

    kinds = [value.type().scalarType() for value in (one, other)]
    if "Bool" in kinds:
        if kinds[0] != kinds[1]:
            # A Python number has the dtype of the tensor beside it.
            constant = [symbolic_helper._is_constant(value) for value in (one, other)]
            one, other = (
                cast(g, value, like) if is_number or kind == "Bool" else value
                for value, like, kind, is_number in (
                    (one, other, kinds[0], constant[0]),
                    (other, one, kinds[1], constant[1]),
                )
            )
        if all(value.type().scalarType() in ("Bool", None) for value in (one, other)):
            return g.op(name.capitalize(), one, other)
    elif symbolic_helper._is_constant(other):
        other = cast(g, other, one)
    elif symbolic_helper._is_constant(one):
        one = cast(g, one, other)
    return torch_calls.exported(g, one, other, operator=f"aten::bitwise_{name}")


def _bitwise_not_symbolic(g: Any, x: Any) -> Any:
    return g.op("Not", x) if x.type().scalarType() == "Bool" else torch_calls.exported(g, x)


@dataclass(frozen=True)
class _FractionalRange:
    """Exports ``arange``: by PyTorch's where the first number or the step has a fraction, or may have one."""

    original: Callable[..., Any]

    def __call__(self, g: Any, *arguments: Any) -> Any:
        from torch.onnx import TensorProtoDataType

        output = g.original_node.output()
        given = arguments[: len(arguments) - len(("dtype", "layout", "device", "pin_memory"))]
        zero, one = (g.op("Constant", value_t=torch.tensor(value)) for value in (0, 1))
        limits = {1: (zero, *given, one), 2: (*given, one)}.get(len(given), given)
        first, _, step = map(constant_number, limits)
        are_whole = all(known is not None and known.is_integer() for known in (first, step))
        if are_whole or not is_floating(output):
            return self.original(g, *arguments)
        doubles = [g.op("Cast", limit, to_i=TensorProtoDataType.DOUBLE) for limit in limits]
        return _range(g, number(g, 0, output), *doubles, dims=[None])


def _transposed(g: Any, x: Any) -> Any:
    """Exports ``mT``, ``mH`` and ``H`` of real matrices: the last two dimensions change places."""
    axes = list(range(len(sizes(x))))
    axes[-2:] = axes[:-3:-1]
    return g.op("Transpose", x, perm_i=axes)


def _unsafe_chunk_symbolic(g: Any, x: Any, chunks: Any, dim: Any, _outputs: int | None = None) -> Any:
    """Exports ``unsafe_chunk`` for sizes that vary."""
    from torch.onnx import errors, symbolic_helper

    count = symbolic_helper._get_const(chunks, "i", "chunks")
    axis = symbolic_helper._get_const(dim, "i", "dim")
    if _outputs is None:
        raise errors.SymbolicValueError("unsafe_chunk into an unknown number of parts is not exported", x)
    size = _size(g, x, axis)
    part = g.op("Div", g.op("Add", size, _whole(g, count - 1)), _whole(g, count))
    return _split_evenly(g, x, part, axis, _outputs)


def _split_symbolic(g: Any, x: Any, part: Any, dim: Any, _outputs: int | None = None) -> Any:
    """Exports ``split`` into parts of one size; the exporter takes the last one for as long as the others."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(part, "i")
    lasts = [output.type().sizes() for output in list(g.original_node.outputs())[-1:]]
    axis = symbolic_helper._get_const(dim, "i", "dim")
    is_even = bool(lasts) and lasts[0] is not None and lasts[0][axis] == known
    if _outputs is None or not isinstance(known, int) or is_even:
        return exporters.symbolic("aten::split")(g, x, part, dim, _outputs)
    return _split_evenly(g, x, _whole(g, known), axis, _outputs)


def _tensor_split_symbolic(g: Any, x: Any, given: Any, dim: Any, _outputs: int | None = None) -> Any:
    """Exports ``tensor_split``, of which the exporter makes a sequence or fails."""
    from torch.onnx import errors, symbolic_helper

    known = symbolic_helper._maybe_get_const(given, "t")
    places = known.tolist() if isinstance(known, Tensor) else known
    if symbolic_helper._is_packed_list(given):
        places = [symbolic_helper._get_const(place, "i", "place") for place in symbolic_helper._unpack_list(given)]
    axis = symbolic_helper._get_const(dim, "i", "dim") % len(sizes(x))
    if isinstance(places, int):
        counts = g.op("Add", _size(g, x, axis), g.op("Constant", value_t=torch.arange(places - 1, -1, -1)))
        parts = g.op("Split", x, g.op("Div", counts, _whole(g, places)), axis_i=axis, outputs=places)
        parts = [parts] if places == 1 else list(parts)
    elif isinstance(places, list):
        ends = zip([0, *places], [*places, 2**63 - 1], strict=True)
        parts = [symbolic_helper._slice_helper(g, x, axes=[axis], starts=[start], ends=[end]) for start, end in ends]
    else:
        raise errors.SymbolicValueError("tensor_split at places that depend on the input is not exported", x)
    return parts if _outputs is not None else g.op("prim::ListConstruct", *parts)


def _split_evenly(g: Any, x: Any, part: Any, axis: int, count: int) -> Any:
    """Splits into parts of one size, of which the last one may be smaller."""
    last = g.op("Sub", _size(g, x, axis), g.op("Mul", part, _whole(g, count - 1)))
    return g.op("Split", x, g.op("Concat", *[part] * (count - 1), last, axis_i=0), axis_i=axis, outputs=count)


def _size(g: Any, x: Any, axis: int) -> Any:
    return g.op("Gather", g.op("Shape", x), _whole(g, axis), axis_i=0)


def _whole(g: Any, value: int) -> Any:
    return g.op("Constant", value_t=torch.tensor([value]))


SYMBOLICS = {
    "aten::pow": _pow_symbolic,
    **{f"aten::__{name}_": partial(_bitwise_symbolic, name) for name in _BITWISE},
    **{f"aten::__i{name}_": partial(_bitwise_symbolic, name) for name in _BITWISE},
    **{f"aten::bitwise_{name}": partial(_bitwise_symbolic, name) for name in _BITWISE},
    "aten::bitwise_not": _bitwise_not_symbolic,
    "aten::mT": _transposed,
    "aten::mH": _transposed,
    "aten::matrix_H": _transposed,
    "aten::unsafe_chunk": _unsafe_chunk_symbolic,
    "aten::split": _split_symbolic,
    "aten::tensor_split": _tensor_split_symbolic,
    "aten::unsafe_split": _split_symbolic,
}
