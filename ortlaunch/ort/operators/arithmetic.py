"""Powers, divisions, operators on bits, ranges and parts of a tensor, where neither the exporter nor a call will do.

torch's exporter rounds ``//`` and ``>>`` of negative integers towards zero, where PyTorch rounds down, and so it does
with numbers with a fraction. onnxruntime 1.19.2 adds up the steps of ``arange`` of numbers with a fraction, and their
rounding errors. Integers have no ``&``, ``|``, ``^`` and ``~``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.operators import exporter, torch_calls
from ortlaunch.ort.operators.torch_nodes import torch_node
from ortlaunch.ort.operators.traced import number as constant_number
from ortlaunch.ort.operators.values import DTYPES, cast, is_floating, number, sizes

_BITWISE = ("and", "or", "xor")


@torch_node("Tensor like, Tensor start, Tensor end, Tensor step", shape=lambda *_: [None])
def _range(like: Tensor, start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=like.dtype, device=like.device)


def register_range() -> None:
    """Registers the symbolic of ``arange``, which replaces the exporter's in part."""
    exporter.replace("aten::arange", _FractionalRange, _FractionalRange)


def _pow_symbolic(g: Any, base: Any, exponent: Any) -> Any:
    # The exporter's newer one casts nothing.
    return exporter.symbolic("aten::pow", 9)(g, base, exponent)


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
        return exporter.symbolic("aten::split")(g, x, part, dim, _outputs)
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


_FLOOR = "floor"
_DIVIDED = ("Long", "Int")
"""Integers for which onnxruntime has a division."""
_OF_SIGNLESS = ("onnx::Cast", "onnx::Unsqueeze", "onnx::Squeeze", "onnx::Add", "onnx::Mul", "onnx::Div")
"""Operators whose result is not negative if no input is."""


def _div(g: Any, one: Any, other: Any, mode: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    if mode is None or symbolic_helper._is_none(mode):
        return exporter.symbolic("aten::div")(g, one, other)
    if g.original_node.output().type().scalarType() not in _DIVIDED:
        return torch_calls.exported(g, one, other, mode)
    if symbolic_helper._get_const(mode, "s", "rounding_mode") == _FLOOR:
        return _floor_divide(g, one, other)
    return exporter.symbolic("aten::div")(g, one, other, mode)


def _floor_divide(g: Any, one: Any, other: Any) -> Any:
    output = g.original_node.output()
    if output.type().scalarType() not in _DIVIDED:
        return torch_calls.exported(g, *(_in_its_dtype(g, x, output) for x in (one, other)))
    one, other = cast(g, one, output), cast(g, other, output)
    # ONNX Runtime computes with sizes, whose division ORTModule's inference of shapes follows.
    if not (is_signless(one) and is_signless(other)):
        one = g.op("Sub", one, g.op("Mod", one, other, fmod_i=0))
    result = g.op("Div", one, other)
    result.setType(output.type().with_sizes([None] * output.type().dim()))
    return result


def _in_its_dtype(g: Any, x: Any, output: Any) -> Any:
    """Casts floating-point numbers to the dtype of the result; one of Python is of fp64, as in ``7.5 // i``."""
    if not is_floating(x) or not is_floating(output):
        return x
    return cast(g, x, output).setType(x.type().with_dtype(DTYPES[output.type().scalarType()]))


def is_signless(value: Any) -> bool:
    """Whether an integer is known not to be negative: a size of a tensor, or what is computed from sizes."""
    node = value.node()
    known = constant_number(value)
    if known is not None:
        return known >= 0
    if node.kind() in _OF_SIGNLESS:
        return all(map(is_signless, list(node.inputs())[: 1 if node.kind() == "onnx::Unsqueeze" else None]))
    is_gathered = node.kind() in ("onnx::Gather", "onnx::Slice")
    return bool((node.inputsAt(0).node() if is_gathered else node).kind() in ("onnx::Shape", "onnx::Size"))


def _remainder(g: Any, one: Any, other: Any) -> Any:
    # The exporter's newer one has no gradient.
    return exporter.symbolic("aten::remainder", 9)(g, one, other)


def _shift(g: Any, x: Any, bits: Any) -> Any:
    return exporter.symbolic("aten::__rshift_")(g, x, bits)


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
    "aten::floor_divide": _floor_divide,
    "aten::div": _div,
    "aten::remainder": _remainder,
    "aten::bitwise_right_shift": _shift,
    "aten::__rshift_": _shift,
}
