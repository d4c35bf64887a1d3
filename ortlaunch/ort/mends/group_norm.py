"""Exports GroupNorm of values that need no gradient, such as the model's input, in a form that trains its parameters.

ORTModule's own form is one node for values, weight and bias. onnxruntime 1.19.2 cannot build the gradient of such a
node without that of its first input.
"""

from __future__ import annotations

from typing import Any

import torch

_OPSET = 17
_ATEN = "org.pytorch.aten::ATen"


def register() -> None:
    """Registers the symbolic; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("aten::group_norm", _group_norm, _OPSET)


def _group_norm(g: Any, values: Any, groups: Any, weight: Any, bias: Any, eps: Any, cudnn_enabled: Any) -> Any:
    """Exports ``torch.nn.functional.group_norm``."""
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx import symbolic_helper

    rank = symbolic_helper._get_tensor_rank(values)
    if rank is None or values.requires_grad() or any(symbolic_helper._is_none(x) for x in (weight, bias)):
        original = CustomOpSymbolicRegistry._SYMBOLICS["::group_norm"]
        return original(g, values, groups, weight, bias, eps, cudnn_enabled)
    sizes = [g.op("Gather", g.op("Shape", values), _constant(g, axis), axis_i=0) for axis in (0, 1)]
    rest = g.op("Div", g.op("Size", values), g.op("Mul", *sizes))
    absent = [g.op("prim::Constant") for _ in range(2)]
    for node in absent:
        node.setType(torch._C.OptionalType.ofTensor())
    epsilon = g.op("Constant", value_t=torch.tensor(symbolic_helper._get_const(eps, "f", "eps"), dtype=torch.float32))
    inputs = [values, *absent, *sizes, rest, groups, epsilon]
    normalized, _, _ = g.op(_ATEN, *inputs, operator_s="native_group_norm", outputs=3)
    normalized.setType(values.type())
    scaled = g.op("Mul", normalized, _per_channel(g, weight, rank))
    return g.op("Add", scaled, _per_channel(g, bias, rank))


def _per_channel(g: Any, parameter: Any, rank: int) -> Any:
    """Reshapes a vector so that it broadcasts along the second dimension."""
    from torch.onnx import symbolic_helper

    return symbolic_helper._unsqueeze_helper(g, parameter, list(range(1, rank - 1))) if rank > 2 else parameter


def _constant(g: Any, value: int) -> Any:
    return g.op("Constant", value_t=torch.tensor(value))
