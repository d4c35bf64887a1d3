"""Padding by reflection or by repetition of the edge, as nodes that call PyTorch's operators.

onnxruntime 1.19.2 has no gradient for ONNX's Pad with these modes.
"""

from __future__ import annotations

from typing import Any

from ortlaunch.ort.mends import exporters

_DOMAIN = "org.pytorch.aten"
_OPSET = 17
_KINDS = {"reflect": "reflection_pad", "replicate": "replication_pad"}
OPERATORS = tuple(f"{kind}{axes}d" for kind in _KINDS.values() for axes in (1, 2, 3))


def register_gradients() -> None:
    """Registers the gradients with ORTModule; call it before the constructor of an ORTModule."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    for operator in OPERATORS:
        CustomGradientRegistry.register(_DOMAIN, "ATen", (operator, ""), lambda name=operator: _gradient(name))


def register() -> None:
    """Registers the symbolics; call it after the constructor of an ORTModule."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("aten::pad", _pad, _OPSET)
    for operator in OPERATORS:
        kind = operator[:-2]
        register_custom_op_symbolic(f"aten::{operator}", lambda g, *args, kind=kind: _call(g, kind, *args), _OPSET)


def _gradient(operator: str) -> list[Any]:
    attributes = {"operator": {"value": f"{operator}_backward", "dtype": "string"}}
    return [(("ATen", _DOMAIN), ["GO(0)", "I(0)", "I(1)"], ["GI(0)"], attributes)]


def _pad(g: Any, values: Any, widths: Any, mode: Any, value: Any = None) -> Any:
    """Exports ``torch.nn.functional.pad``; constant and circular padding are the exporter's own."""
    from torch.onnx import symbolic_helper

    kind = _KINDS.get(symbolic_helper._get_const(mode, "s", "mode"))
    if kind is None:
        return exporters.symbolic("aten::pad")(g, values, widths, mode, value)
    return _call(g, kind, values, widths)


def _call(g: Any, kind: str, values: Any, widths: Any) -> Any:
    from torch.onnx import symbolic_helper

    axes = _count(widths) // 2
    if symbolic_helper._is_packed_list(widths):
        parts = [symbolic_helper._unsqueeze_helper(g, width, [0]) for width in symbolic_helper._unpack_list(widths)]
        widths = g.op("Concat", *parts, axis_i=0)
    output = g.op(f"{_DOMAIN}::ATen", values, widths, operator_s=f"{kind}{axes}d")
    output.setType(values.type().with_sizes([None] * values.type().dim()))
    return output


def _count(widths: Any) -> int:
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_packed_list(widths):
        return len(symbolic_helper._unpack_list(widths))
    return len(symbolic_helper._get_const(widths, "is", "pad"))
