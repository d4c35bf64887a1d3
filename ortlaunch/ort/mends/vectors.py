"""ONNX symbolics for matrix products with a vector, and for sums with a product that the exporter lacks.

The gradient of MatMul that onnxruntime 1.19.2 builds is wrong or fails for operands of rank 1, so that vectors become
matrices with one row or column.
"""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort.mends import exporters


def matmul(g: Any, left: Any, right: Any) -> Any:
    """Exports ``left @ right``, where either may be a vector."""
    from torch.onnx import symbolic_helper

    has_row, has_column = (symbolic_helper._get_tensor_rank(x) == 1 for x in (left, right))
    if has_row:
        left = symbolic_helper._unsqueeze_helper(g, left, [0])
    if has_column:
        right = symbolic_helper._unsqueeze_helper(g, right, [1])
    product = g.op("MatMul", left, right)
    axes = [-2] * has_row + [-1] * has_column
    # The exporter's helper for it refuses results of unknown rank.
    return g.op("Squeeze", product, g.op("Constant", value_t=torch.tensor(axes))) if axes else product


def linear(g: Any, values: Any, weight: Any, bias: Any = None) -> Any:
    """Exports ``torch.nn.functional.linear``; the weight or the values may be a vector."""
    from torch.onnx import symbolic_helper

    ranks = [symbolic_helper._get_tensor_rank(x) for x in (values, weight)]
    if 1 not in ranks:
        return exporters.symbolic("aten::linear")(g, values, weight, bias)
    turned = weight if ranks[1] == 1 else g.op("Transpose", weight, perm_i=[1, 0])
    product = matmul(g, values, turned)
    has_bias = bias is not None and not symbolic_helper._is_none(bias)
    return g.op("Add", product, bias) if has_bias else product


def _addmv(g: Any, values: Any, matrix: Any, vector: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``beta * values + alpha * (matrix @ vector)``."""
    return _sum(g, values, matmul(g, matrix, vector), beta, alpha)


def _addbmm(g: Any, values: Any, left: Any, right: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``beta * values + alpha * (left @ right).sum(0)``."""
    axis = g.op("Constant", value_t=torch.tensor([0]))
    return _sum(g, values, g.op("ReduceSum", g.op("MatMul", left, right), axis, keepdims_i=0), beta, alpha)


def _addr(g: Any, values: Any, left: Any, right: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``beta * values + alpha * outer(left, right)``."""
    from torch.onnx import symbolic_helper

    column = symbolic_helper._unsqueeze_helper(g, left, [1])
    row = symbolic_helper._unsqueeze_helper(g, right, [0])
    return _sum(g, values, g.op("Mul", column, row), beta, alpha)


def _sum(g: Any, values: Any, product: Any, beta: Any, alpha: Any) -> Any:
    from torch.onnx import symbolic_helper

    scaled = _scaled(g, product, alpha, like=values)
    if symbolic_helper._maybe_get_const(beta, "f") == 0.0:
        # torch ignores the values then, even if they are not finite, but the result has their dtype.
        return scaled
    return g.op("Add", _scaled(g, values, beta, like=values), scaled)


def _scaled(g: Any, values: Any, factor: Any, like: Any) -> Any:
    from torch.onnx import _type_utils, symbolic_helper

    scalar_type = _type_utils.JitScalarType.from_value(like)
    number = symbolic_helper._maybe_get_const(factor, "f")
    if not isinstance(number, int | float):
        return g.op("Mul", values, g.op("Cast", factor, to_i=scalar_type.onnx_type()))
    if number == 1:
        return values
    return g.op("Mul", values, g.op("Constant", value_t=torch.tensor(float(number), dtype=scalar_type.dtype())))


SYMBOLICS = {
    **{f"aten::{name}": matmul for name in ("matmul", "mv", "dot", "vdot")},
    "aten::linear": linear,
    "aten::addmv": _addmv,
    "aten::addbmm": _addbmm,
    "aten::addr": _addr,
}
