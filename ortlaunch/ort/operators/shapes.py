"""Output shapes of our ATen nodes, for ORTModule's symbolic shape inference.

For an unknown operator, ORTModule assumes a result of the first input's rank. If that input is a weight or a bias, the
gradients of all later nodes would be summed over the batch, as if they had been broadcast to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np


def register() -> None:
    """Registers the operators' shapes for every inference of this process; repeated calls do nothing."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    if hasattr(SymbolicShapeInference, "_ortlaunch_init"):
        return
    original = SymbolicShapeInference.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for operator in _LOSSES:
            self.dispatcher_[operator] = partial(_set_loss_shape, self, self.dispatcher_[operator])
        self.dispatcher_["BatchNormInternal"] = partial(_set_batch_norm_shapes, self)
        for operator, shapes in _SHAPES.items():
            self.aten_op_dispatcher_[operator] = lambda node, shapes=shapes: _set_shapes(self, node, shapes)

    infer = SymbolicShapeInference.infer_shapes

    def infer_shapes(*args: Any, **kwargs: Any) -> Any:
        """Infers without the file that onnxruntime leaves in the current folder where it fails."""
        from onnxruntime.tools import symbolic_shape_infer

        with _without_saving(symbolic_shape_infer):
            return infer(*args, **kwargs)

    values = SymbolicShapeInference._get_int_or_float_values

    def finite(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads constants as integers, because they may be sizes; infinity and NaN, at which it fails, are none."""
        try:
            return values(self, node, *args, **kwargs)
        except (OverflowError, ValueError):
            return [None] * len(node.input)

    SymbolicShapeInference.infer_shapes = staticmethod(infer_shapes)
    SymbolicShapeInference._get_int_or_float_values = finite
    SymbolicShapeInference._ortlaunch_init = SymbolicShapeInference.__init__ = init


@contextlib.contextmanager
def _without_saving(module: Any) -> Iterator[None]:
    """Makes a module's own ``onnx.save_model`` do nothing."""
    original = module.onnx
    module.onnx = _Onnx(original)
    try:
        yield
    finally:
        module.onnx = original


class _Onnx:
    """The package onnx, which saves no models."""

    def __init__(self, package: Any) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)

    def save_model(self, *_args: Any, **_options: Any) -> None:
        """Saves nothing."""


def add(operator: str, shapes: Callable[..., list[list[Any]]]) -> None:
    """Adds an operator: from the inputs' shapes, the function makes those of the outputs; None is an unknown size."""
    _SHAPES[operator] = shapes


def _set_shapes(inference: Any, node: Any, shapes: Callable[..., list[list[Any]]]) -> None:
    from onnx import TensorProto, helper
    from onnxruntime.tools.symbolic_shape_infer import get_shape_from_sympy_shape

    inputs = [_shape_or_number(inference, node, index) if name else None for index, name in enumerate(node.input)]
    # All of these operators compute in the type of their first input.
    kind = inference.known_vi_[node.input[0]].type.tensor_type.elem_type
    for index, (name, shape) in enumerate(zip(node.output, shapes(*inputs), strict=True)):
        is_seed = shape is _SEED
        known = [
            inference._new_symbolic_dim_from_output(node, index, axis) if size is None else size
            for axis, size in enumerate(shape)
        ]
        inference._update_computed_dims(known)
        dims = [] if is_seed else get_shape_from_sympy_shape(known)
        info = helper.make_tensor_value_info(name, TensorProto.INT64 if is_seed else kind, dims)
        inference.known_vi_[name].CopyFrom(info)


def _set_loss_shape(inference: Any, original: Callable[[Any], None], node: Any) -> None:
    """Infers as onnxruntime does, which takes each loss for a number, also one for each target."""
    from onnxruntime.tools.symbolic_shape_infer import get_attribute

    original(node)
    if get_attribute(node, "reduction", b"mean") == b"none":
        shape = inference.known_vi_[node.output[0]].type.tensor_type.shape
        shape.CopyFrom(inference.known_vi_[node.input[1]].type.tensor_type.shape)


def _set_batch_norm_shapes(inference: Any, node: Any) -> None:
    """Infers what onnxruntime infers for ``BatchNormalization`` alone.

    It would invent sizes behind each layer, and infer the whole graph again for each ``cat`` or sum of such results.
    """
    inference._propagate_shape_and_type(node)
    for index in range(1, len(node.output)):
        # The statistics have the shape and the type of the running mean.
        inference._propagate_shape_and_type(node, input_index=3, output_index=index)


def _shape_or_number(inference: Any, node: Any, index: int) -> Any:
    """Returns the shape of an input, or its value if that is a number or a list of integers; symbols stay symbols."""
    from onnx import TensorProto

    shape = inference._get_sympy_shape(node, index)
    is_integer = inference.known_vi_[node.input[index]].type.tensor_type.elem_type == TensorProto.INT64
    value = inference._try_get_value(node, index) if not shape or (len(shape) == 1 and is_integer) else None
    if value is None:
        return shape
    numbers = np.asarray(value, dtype=object)
    # The inference may hold a number as a list of one, and the other way round.
    return Values(_integer(number) for number in numbers.reshape(-1)) if shape else _integer(numbers.item())


def _integer(number: Any) -> Any:
    """Returns an int; a size that varies, such as ``x.size(1)``, is a symbol and stays so."""
    from onnxruntime.tools.symbolic_shape_infer import is_literal

    return int(number) if is_literal(number) else number


class Values(list[Any]):
    """The values of a list of integers that is known, in place of its shape."""


def shape_alone(input_: Any) -> Any:
    """Returns the shape of a tensor that a shape function got, also where the value is known; None if it is omitted."""
    if isinstance(input_, Values):
        return [len(input_)]
    return input_ if input_ is None or isinstance(input_, (list, tuple)) else []


_SEED: list[Any] = []
"""The shape of a seed, an int64."""


_LOSSES = ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal", "NegativeLogLikelihoodLossInternal")
_SHAPES: dict[str, Callable[..., list[list[Any]]]] = {
    "detach_copy": lambda x: [shape_alone(x)],
    "ortlaunch::gelu": lambda x: [x],
    "ortlaunch::gelu_tanh": lambda x: [x],
    "ortlaunch::sigmoid": lambda x: [shape_alone(x)],
    "ortlaunch::silu": lambda x: [shape_alone(x)],
    "ortlaunch::dropout": lambda x, rate: [x, _SEED],
    "ortlaunch::linear": lambda weight, x: [[*x[:-1], weight[0]]],
    "ortlaunch::linear_bias": lambda weight, bias, x: [[*x[:-1], weight[0]]],
    "ortlaunch::linear_trained": lambda weight, x: [[*x[:-1], weight[0]]],
    "ortlaunch::linear_bias_trained": lambda weight, bias, x: [[*x[:-1], weight[0]]],
    "ortlaunch::conv1d": lambda bias, x, weight: [[*x[:-1], weight[1]]],
    "ortlaunch::conv1d_trained": lambda bias, x, weight: [[*x[:-1], weight[1]]],
    "ortlaunch::cross_entropy": lambda logits, target, ignore: [[], [*logits[:1], 2], []],
    "ortlaunch::layer_norm": lambda weight, bias, x, epsilon: [x, *[_moments(weight, x)] * 2],
    "ortlaunch::rms_norm": lambda weight, x, epsilon: [x, [*x[:-1], 1]],
    "ortlaunch::silu_product": lambda gate, x: [_joined(gate, x)],
    "ortlaunch::attention_sideways": lambda q, k, v, *rest: _attended(q, k, v, 2),
    "ortlaunch::attention": lambda q, k, v, *rest: _attended(q, k, v, 1),
    "ortlaunch::attention_packed": lambda x, mask, heads, *rest: [
        [*x[:2], heads, x[2] // (3 * heads)],
        [x[0], heads, x[1]],
        _SEED,
    ],
}


def _joined(one: list[Any], other: list[Any]) -> list[Any]:
    """Returns the shape to which two shapes of one length broadcast."""
    return [b if a == 1 else a for a, b in zip(one, other, strict=True)]


def _attended(query: list[Any], key: list[Any], value: list[Any], heads_axis: int) -> list[list[Any]]:
    """Returns the shapes of what attention returns; a batch or heads of one are broadcast."""
    sizes = list(query)
    for axis in (0, heads_axis):
        # Several heads of the query may share one of key and value.
        sizes[axis] = next((x[axis] for x in (query, key, value) if x[axis] != 1), 1)
    heads, places = (sizes[1], sizes[2]) if heads_axis == 1 else (sizes[2], sizes[1])
    return [[*sizes[:3], value[3]], [sizes[0], heads, places], _SEED]


def _moments(weight: list[Any], x: list[Any]) -> list[Any]:
    return [*x[: len(x) - len(weight)], *[1] * len(weight)]
