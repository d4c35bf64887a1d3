"""Writes nodes that call torch's operators into the graph, and describes their gradients to ORTModule."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ortlaunch.ort.graphs.gradients import STOPS
from ortlaunch.ort.graphs.nodes import ATEN

ATEN_OP = "org.pytorch.aten::ATen"


def step(operator: str, inputs: list[str], outputs: list[str]) -> Any:
    """Makes a node of a registered gradient; GO, GI, I and O stand for gradients, inputs and outputs."""
    return (ATEN, inputs, outputs, {"operator": {"value": operator, "dtype": "string"}})


def gradient(operator: str, inputs: str, count: int) -> list[Any]:
    """Describes the gradient of an operator whose ``_backward`` returns those of its first inputs.

    Args:
        operator: the operator.
        inputs: of the gradient, with spaces between them.
        count: how many inputs have a gradient.
    """
    return [step(f"{operator}_backward", inputs.split(), [f"GI({index})" for index in range(count)])]


def register_gradients(gradients: Mapping[str, list[Any]]) -> None:
    """Registers the gradients of operators with ORTModule; call it before ORTModule's constructor."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    operator, domain = ATEN
    for name, steps in gradients.items():
        CustomGradientRegistry.register(domain, operator, (name, ""), partial(list, steps))


def none(g: Any) -> Any:
    """Makes an omitted argument."""
    node = g.op("prim::Constant")
    node.setType(torch._C.OptionalType.ofTensor())
    return node


def constant(g: Any, value: float) -> Any:
    """Makes a number in the only floating-point type that an ATen node passes."""
    return g.op("Constant", value_t=torch.tensor(value, dtype=torch.float32))


def stop_gradient(g: Any, value: Any) -> Any:
    """Exports a copy of `value` through which no gradient flows back."""
    # aten::detach is not used: ONNX Runtime does not know that its result shares memory, and may overwrite it.
    stopped = g.op(ATEN_OP, value, operator_s=STOPS)
    stopped.setType(value.type())
    return stopped
