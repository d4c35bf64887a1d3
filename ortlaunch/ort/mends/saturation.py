"""The sigmoid and SiLU as nodes that call PyTorch's.

The kernel of onnxruntime 1.19.2 for fp32 takes what is below -18 for -18, and its error is 6e-8 at any size. So
``sigmoid(x) / sigmoid(x).sum()`` and ``log(sigmoid(x))`` were wrong for x < -10, and infinite for x < -18.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ortlaunch.ort.kernels import shapes
from ortlaunch.ort.kernels.aten_nodes import ATEN_OP, gradient
from ortlaunch.ort.kernels.aten_nodes import register_gradients as register_node_gradients
from ortlaunch.ort.mends.values import cast, is_floating

_SIGMOID = "sigmoid"
_SILU = "silu"


def register_gradients() -> None:
    """Registers the gradients of these nodes with ORTModule; call it before ORTModule's constructor."""
    register_node_gradients({_SIGMOID: gradient(_SIGMOID, "GO(0) O(0)", 1), _SILU: gradient(_SILU, "GO(0) I(0)", 1)})
    for name in (_SIGMOID, _SILU):
        shapes.add(name, lambda x: [shapes.shape_alone(x)])


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
