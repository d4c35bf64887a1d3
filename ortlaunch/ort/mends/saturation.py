"""The sigmoid and SiLU as nodes that call PyTorch's.

The kernel of onnxruntime 1.19.2 for fp32 takes what is below -18 for -18, and its error is 6e-8 at any size. So
``sigmoid(x) / sigmoid(x).sum()`` and ``log(sigmoid(x))`` were wrong for x < -10, and infinite for x < -18.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ortlaunch.ort.kernels import shapes
from ortlaunch.ort.kernels.aten_nodes import ATEN, ATEN_OP, step
from ortlaunch.ort.mends.values import cast, is_floating

_SIGMOID = "sigmoid"
_SILU = "silu"


def register_gradients() -> None:
    """Registers the gradients of these nodes with ORTModule; call it before ORTModule's constructor."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    operator, domain = ATEN
    for name, gradient in ((_SIGMOID, sigmoid_gradient), (_SILU, silu_gradient)):
        CustomGradientRegistry.register(domain, operator, (name, ""), partial(gradient, name))
        shapes.add(name, lambda x: [shapes.shape_alone(x)])


def sigmoid_gradient(operator: str) -> list[Any]:
    """Returns the gradient of an operator that is a sigmoid, from its result."""
    return [step(f"{operator}_backward", ["GO(0)", "O(0)"], ["GI(0)"])]


def silu_gradient(operator: str) -> list[Any]:
    """Returns the gradient of an operator that is a SiLU."""
    return [step(f"{operator}_backward", ["GO(0)", "I(0)"], ["GI(0)"])]


def called(operator: str, g: Any, x: Any) -> Any:
    """Exports a function of one tensor as a node that calls an operator; integers become floating-point numbers."""
    output = g.original_node.output()
    if not is_floating(x):
        x = cast(g, x, output)
        x.setType(output.type())
    result = g.op(ATEN_OP, x, operator_s=operator)
    result.setType(x.type())
    return result


SYMBOLICS = {f"aten::{name}": partial(called, name) for name in (_SIGMOID, _SILU)}
