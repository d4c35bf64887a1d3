"""Reads the graph that the exporter is writing, in which a symbolic looks for what leads to its arguments."""

from __future__ import annotations

from typing import Any

from ortlaunch.ort.operators.aten_nodes import ATEN_OP
from ortlaunch.ort.operators.attention import known_size

_LISTS = ("prim::ListConstruct", "onnx::Concat")
"""Operators that build a shape, before and after the exporter's conversion."""


def attribute(node: Any, name: str) -> Any:
    """Returns the value of a node's attribute; an empty tuple if it has none of that name."""
    return getattr(node, node.kindOf(name))(name) if node.hasAttribute(name) else ()


def operator_called(node: Any) -> str:
    """Returns the operator that an ATen node calls; empty for any other node."""
    return str(attribute(node, "operator")) if node.kind() == ATEN_OP else ""


def integers(value: Any) -> list[int] | None:
    """Returns the integers of a constant; None for anything else."""
    node = value.node()
    if node.kind() == "onnx::Unsqueeze":
        node = node.inputsAt(0).node()
    return node.t("value").flatten().tolist() if node.kind() == "onnx::Constant" else None


def places_of(shape: Any) -> list[Any]:
    """Returns the sizes in a list that the graph builds; none of any other shape."""
    return list(shape.node().inputs()) if shape.node().kind() in _LISTS else []


def rank_of(value: Any) -> int | None:
    """Returns the number of dimensions of a traced tensor; None if it is not known."""
    from torch.onnx import symbolic_helper

    rank: int | None = symbolic_helper._get_tensor_rank(value)
    return rank


def is_vector(value: Any, length: int | None) -> bool:
    """Whether a value is known to be a vector of this length, so that it is not broadcast."""
    return length is not None and rank_of(value) == 1 and known_size(value, 0) == length


def widened(values: Any, width: int | None) -> Any:
    """Returns the type of `values` with another last size; the other sizes are known only when the graph runs."""
    return values.type().with_sizes([*[None] * (values.type().dim() - 1), width])


def number(value: Any) -> float | None:
    """Returns a constant of one element; None for anything else."""
    node = value.node()
    while node.kind() == "onnx::Cast":
        node = node.inputsAt(0).node()
    if node.kind() != "onnx::Constant":
        return None
    tensor = node.t("value")
    return float(tensor.item()) if tensor.numel() == 1 else None


def without_casts(value: Any) -> Any:
    """Returns the value before casts to the dtype that it already has, such as ``x.float()`` of fp32."""
    while value.node().kind() == "onnx::Cast":
        before = value.node().inputsAt(0)
        if before.type().scalarType() is None or before.type().scalarType() != value.type().scalarType():
            break
        value = before
    return value


def inputs_of(value: Any, kind: str) -> list[Any] | None:
    """Returns the inputs of the node that makes `value` if it is of this kind, such as ``onnx::Add``."""
    node = without_casts(value).node()
    return list(node.inputs()) if node.kind() == kind else None


def input_of_call(value: Any, operator: str) -> Any | None:
    """Returns the first input of the ATen node that makes `value` if it calls this operator."""
    node = without_casts(value).node()
    return node.inputsAt(0) if operator_called(node) == operator else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one, but for casts to the dtype that it already has."""
    return bool(without_casts(one).debugName() == without_casts(other).debugName())


def size_of(value: Any) -> tuple[str, int] | None:
    """Returns the tensor's name and the axis if the value is a size of a tensor, else None."""
    node = _before_conversions(value).node()
    if node.kind() != "onnx::Gather":
        return None
    shape, index = node.inputs()
    axis = integers(index)
    is_size = shape.node().kind() == "onnx::Shape" and axis is not None and len(axis) == 1
    return (shape.node().inputsAt(0).debugName(), axis[0]) if is_size and axis else None


def half_size_of(value: Any) -> tuple[str, int] | None:
    """Returns the tensor's name and the axis if the value is ``tensor.shape[axis] // 2``, else None."""
    node = _before_conversions(value).node()
    if node.kind() != "onnx::Div":
        return None
    size, divisor = node.inputs()
    return size_of(size) if number(divisor) == 2.0 else None


def _before_conversions(value: Any) -> Any:
    """Returns a number before its casts and before it became a list of one."""
    while value.node().kind() in ("onnx::Unsqueeze", "onnx::Cast"):
        value = value.node().inputsAt(0)
    return value
