"""ONNX symbolics for ATen operators that torch's TorchScript exporter lacks or exports wrongly at ORTModule's opset.

transformers' causal models use ``diff`` and ``cumsum`` without an attention mask, to look for packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort.mends.attention import scaled_dot_product_attention

_OPSET = 17


def register() -> None:
    """Registers the symbolics; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("aten::diff", _diff, _OPSET)
    register_custom_op_symbolic("aten::cumsum", _cumsum, _OPSET)
    register_custom_op_symbolic("aten::layer_norm", _layer_norm, _OPSET)
    register_custom_op_symbolic("aten::rms_norm", _rms_norm, _OPSET)
    register_custom_op_symbolic("aten::scaled_dot_product_attention", scaled_dot_product_attention, _OPSET)


def _diff(g: Any, values: Any, n: Any, dim: Any, prepend: Any, append: Any) -> Any:
    """Exports ``torch.diff``: `n`-th differences along `dim` of `values` with `prepend` and `append` joined on."""
    from torch.onnx import symbolic_helper

    count = symbolic_helper._get_const(n, "i", "n")
    axis = symbolic_helper._get_const(dim, "i", "dim")
    parts = [part for part in (prepend, values, append) if not symbolic_helper._is_none(part)]
    joined = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else values
    is_bool = joined.type().scalarType() == "Bool"
    for _ in range(count):
        later = symbolic_helper._slice_helper(g, joined, axes=[axis], starts=[1], ends=[2**63 - 1])
        earlier = symbolic_helper._slice_helper(g, joined, axes=[axis], starts=[0], ends=[-1])
        # The difference of booleans means "differs", and ONNX's Sub does not take booleans.
        joined = g.op("Xor", later, earlier) if is_bool else g.op("Sub", later, earlier)
    return joined


def _cumsum(g: Any, values: Any, dim: Any, dtype: Any = None) -> Any:
    """Exports ``torch.cumsum``; torch sums booleans and small integers as int64, and ONNX's CumSum does not."""
    from torch.onnx import TensorProtoDataType, symbolic_helper

    scalar_type = values.type().scalarType()
    if dtype is not None and not symbolic_helper._is_none(dtype):
        values = g.op("Cast", values, to_i=_onnx_type(symbolic_helper._get_const(dtype, "i", "dtype")))
    elif scalar_type in ("Bool", "Byte", "Char", "Short", "Int"):
        values = g.op("Cast", values, to_i=TensorProtoDataType.INT64)
    return g.op("CumSum", values, dim)


def _layer_norm(g: Any, values: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any, cudnn_enable: Any) -> Any:
    """Exports ``torch.nn.functional.layer_norm``; the gradient needs a weight and a bias even if the model has none."""
    from torch.onnx import _type_utils, symbolic_helper

    shape = symbolic_helper._get_const(normalized_shape, "is", "normalized_shape")
    dtype = _type_utils.JitScalarType.from_value(values).dtype()
    if symbolic_helper._is_none(weight):
        weight = g.op("Constant", value_t=torch.ones(shape, dtype=dtype))
    if symbolic_helper._is_none(bias):
        bias = g.op("Constant", value_t=torch.zeros(shape, dtype=dtype))
    epsilon = symbolic_helper._get_const(eps, "f", "eps")
    # The gradient needs the other two outputs.
    normalized, _, _ = g.op(
        "LayerNormalization", values, weight, bias, epsilon_f=epsilon, axis_i=-len(shape), outputs=3
    )
    return normalized


def _rms_norm(g: Any, values: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    """Exports ``torch.nn.functional.rms_norm``; half precision is computed in fp32, as torch does."""
    from torch.onnx import TensorProtoDataType, _type_utils, symbolic_helper

    scalar_type = _type_utils.JitScalarType.from_value(values)
    dtype = scalar_type.dtype()
    small = torch.finfo(dtype).eps if symbolic_helper._is_none(eps) else symbolic_helper._get_const(eps, "f", "eps")
    shape = symbolic_helper._get_const(normalized_shape, "is", "normalized_shape")
    is_half = dtype in (torch.float16, torch.bfloat16)
    work = g.op("Cast", values, to_i=TensorProtoDataType.FLOAT) if is_half else values
    work_dtype = torch.float32 if is_half else dtype
    # ONNX Runtime fuses exactly this sequence into a single kernel.
    squares = g.op("Pow", work, g.op("Constant", value_t=torch.tensor(2.0, dtype=work_dtype)))
    mean = g.op("ReduceMean", squares, axes_i=list(range(-len(shape), 0)), keepdims_i=1)
    root = g.op("Sqrt", g.op("Add", mean, g.op("Constant", value_t=torch.tensor(small, dtype=work_dtype))))
    normalized = g.op("Div", work, root)
    if is_half:
        normalized = g.op("Cast", normalized, to_i=scalar_type.onnx_type())
    return normalized if symbolic_helper._is_none(weight) else g.op("Mul", normalized, weight)


def _onnx_type(torch_scalar_type: int) -> Any:
    from torch.onnx import _type_utils

    return _type_utils.JitScalarType(torch_scalar_type).onnx_type()
