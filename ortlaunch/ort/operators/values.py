"""Arguments of the exporter's symbolics, read and written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ortlaunch.ort.operators.aten_nodes import none

FLOATS = ("Half", "Float", "Double", "BFloat16")
"""The exporter's names of the floating-point dtypes."""
DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
"""All dtypes, by these names."""


def integers(g: Any, value: Any) -> Any:
    """Returns a list of integers as one value of the graph; sizes that depend on the input are joined in the graph.

    Returns None for an omitted list.
    """
    from torch.onnx import TensorProtoDataType, symbolic_helper

    if symbolic_helper._is_none(value):
        return none(g)
    known = symbolic_helper._maybe_get_const(value, "is")
    if not isinstance(known, torch._C.Value):
        return g.op("Constant", value_t=torch.tensor(known, dtype=torch.int64))
    if not symbolic_helper._is_packed_list(value):
        return value
    items = []
    for item in symbolic_helper._unpack_list(value):
        whole = g.op("Cast", item, to_i=TensorProtoDataType.INT64)
        items.append(g.op("Reshape", whole, g.op("Constant", value_t=torch.tensor([1]))))
    return g.op("Concat", *items, axis_i=0)


def sizes(value: Any) -> list[int | None]:
    """Returns the sizes of a traced tensor, None where one varies."""
    from torch.onnx import symbolic_helper

    rank = symbolic_helper._get_tensor_rank(value)
    return [symbolic_helper._get_tensor_dim_size(value, axis) for axis in range(rank)]


def is_floating(value: Any) -> bool:
    """Whether a traced tensor has a floating-point dtype."""
    return value.type().scalarType() in FLOATS


def kinds_of(values: Iterable[Any]) -> list[str | None]:
    """Returns the dtypes of the tensors among traced values, by the exporter's names."""
    return [one.type().scalarType() for one in values if one.type().kind() == "TensorType"]


def cast(g: Any, value: Any, like: Any) -> Any:
    """Casts a value to the dtype of another one."""
    from torch.onnx import _type_utils

    return g.op("Cast", value, to_i=_type_utils.JitScalarType.from_value(like).onnx_type())


def number(g: Any, value: float, like: Any) -> Any:
    """Makes a scalar of another value's dtype."""
    from torch.onnx import _type_utils

    return g.op("Constant", value_t=torch.tensor(value, dtype=_type_utils.JitScalarType.from_value(like).dtype()))
