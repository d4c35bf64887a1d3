"""Writes nodes that call torch's operators into the graph, and describes their gradients to ORTModule."""

from __future__ import annotations

from typing import Any

import torch

ATEN = ("ATen", "org.pytorch.aten")
ATEN_OP = "org.pytorch.aten::ATen"


def step(operator: str, inputs: list[str], outputs: list[str]) -> Any:
    """Makes a node of a registered gradient; GO, GI, I and O stand for gradients, inputs and outputs."""
    return (ATEN, inputs, outputs, {"operator": {"value": operator, "dtype": "string"}})


def none(g: Any) -> Any:
    """Makes an omitted argument."""
    node = g.op("prim::Constant")
    node.setType(torch._C.OptionalType.ofTensor())
    return node


def constant(g: Any, value: float) -> Any:
    """Makes a number in the only floating-point type that an ATen node passes."""
    return g.op("Constant", value_t=torch.tensor(value, dtype=torch.float32))


def operator_of(node: Any) -> str:
    """Returns the operator that an ATen node calls; empty for any other node."""
    is_aten = (node.op_type, node.domain) == ATEN
    return next((x.s.decode() for x in node.attribute if x.name == "operator"), "") if is_aten else ""
