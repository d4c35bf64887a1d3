"""Divisions that round, remainders, and shifts to the right.

torch's exporter rounds ``//`` and ``>>`` of negative integers towards zero, where PyTorch rounds down. Numbers with a
fraction it rounds so too, and their remainders by way of a rounded quotient; onnxruntime 1.19.2 has no gradient for
either.
"""

from __future__ import annotations

from typing import Any

from ortlaunch.ort.kernels.traced import number
from ortlaunch.ort.mends import exporters, torch_calls
from ortlaunch.ort.mends.values import DTYPES, cast, is_floating

_FLOOR = "floor"
_DIVIDED = ("Long", "Int")
"""Integers for which onnxruntime has a division."""
_OF_SIGNLESS = ("onnx::Cast", "onnx::Unsqueeze", "onnx::Squeeze", "onnx::Add", "onnx::Mul", "onnx::Div")
"""Operators whose result is not negative if no input is."""


def _div(g: Any, one: Any, other: Any, mode: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    if mode is None or symbolic_helper._is_none(mode):
        return exporters.symbolic("aten::div")(g, one, other)
    if g.original_node.output().type().scalarType() not in _DIVIDED:
        return torch_calls.exported(g, one, other, mode)
    if symbolic_helper._get_const(mode, "s", "rounding_mode") == _FLOOR:
        return _floor_divide(g, one, other)
    return exporters.symbolic("aten::div")(g, one, other, mode)


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
    known = number(value)
    if known is not None:
        return known >= 0
    if node.kind() in _OF_SIGNLESS:
        return all(map(is_signless, list(node.inputs())[: 1 if node.kind() == "onnx::Unsqueeze" else None]))
    is_gathered = node.kind() in ("onnx::Gather", "onnx::Slice")
    return bool((node.inputsAt(0).node() if is_gathered else node).kind() in ("onnx::Shape", "onnx::Size"))


def _remainder(g: Any, one: Any, other: Any) -> Any:
    # The exporter's newer one has no gradient.
    return exporters.symbolic("aten::remainder", 9)(g, one, other)


def _shift(g: Any, x: Any, bits: Any) -> Any:
    return exporters.symbolic("aten::__rshift_")(g, x, bits)


SYMBOLICS = {
    "aten::floor_divide": _floor_divide,
    "aten::div": _div,
    "aten::remainder": _remainder,
    "aten::bitwise_right_shift": _shift,
    "aten::__rshift_": _shift,
}
