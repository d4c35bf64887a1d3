"""Output shapes of our ATen nodes, for ORTModule's symbolic shape inference.

It takes an operator that it does not know to return a tensor of its first input's rank. Where that is a weight or a
bias, the gradients of everything behind would be summed over the batch as if they had been broadcast to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Makes the operators' shapes known to every inference of this process; harmless to repeat."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    if hasattr(SymbolicShapeInference, "_ortlaunch_init"):
        return
    original = SymbolicShapeInference.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for operator, shapes in _SHAPES.items():
            self.aten_op_dispatcher_[operator] = lambda node, shapes=shapes: _set_shapes(self, node, shapes)

    SymbolicShapeInference._ortlaunch_init = SymbolicShapeInference.__init__ = init


def _set_shapes(inference: Any, node: Any, shapes: Callable[..., list[list[Any]]]) -> None:
    from onnx import helper
    from onnxruntime.tools.symbolic_shape_infer import get_shape_from_sympy_shape

    inputs = [inference._get_sympy_shape(node, index) if name else None for index, name in enumerate(node.input)]
    # All of these compute in the type of their first input.
    kind = inference.known_vi_[node.input[0]].type.tensor_type.elem_type
    for name, shape in zip(node.output, shapes(*inputs), strict=True):
        info = helper.make_tensor_value_info(name, kind, get_shape_from_sympy_shape(shape))
        inference.known_vi_[name].CopyFrom(info)


_SHAPES: dict[str, Callable[..., list[list[Any]]]] = {
    "detach_copy": lambda x: [x],
    "gelu": lambda x, _approximate: [x],
    "ortlaunch::gelu_tanh": lambda x: [x],
    "ortlaunch::dropout": lambda x, rate: [x, x],
    "ortlaunch::linear": lambda weight, x: [[*x[:-1], weight[0]]],
    "ortlaunch::linear_bias": lambda weight, bias, x: [[*x[:-1], weight[0]]],
    "ortlaunch::conv1d": lambda bias, x, weight: [[x[0], weight[1]]],
    "ortlaunch::cross_entropy": lambda logits, target, ignore: [[], logits, []],
}
