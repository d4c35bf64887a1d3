"""How nodes that call torch's operators are written into the graph, and their gradients told to ORTModule."""

from __future__ import annotations

from typing import Any

import torch

ATEN = ("ATen", "org.pytorch.aten")
ATEN_OP = "org.pytorch.aten::ATen"


def step(operator: str, inputs: list[str], outputs: list[str]) -> Any:
    """One node of a registered gradient, in which GO, GI, I and O stand for gradients, inputs and outputs."""
    return (ATEN, inputs, outputs, {"operator": {"value": operator, "dtype": "string"}})


def none(g: Any) -> Any:
    """An argument left out."""
    node = g.op("prim::Constant")
    node.setType(torch._C.OptionalType.ofTensor())
    return node


def constant(g: Any, value: float) -> Any:
    """A number in the one format of floating-point numbers that an ATen node passes."""
    return g.op("Constant", value_t=torch.tensor(value, dtype=torch.float32))
