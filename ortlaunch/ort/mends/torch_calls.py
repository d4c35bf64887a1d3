"""Exports operators that have no ONNX export as nodes that call PyTorch, and PyTorch computes their gradients.

torch has some hundred operators that neither its TorchScript exporter nor this package exports: losses, special
functions, linear algebra. One operator of the graph serves them all. Its inputs are tensors and a list of integers that
spells which operator of torch it calls, with which other arguments.

A whole number that depends on the input, such as a size, is a tensor of the node too. Not served are operators that
draw random numbers, change an argument in place or have complex values.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.mends import in_part
from ortlaunch.ort.mends.in_part import OPSET as OPSET
from ortlaunch.ort.mends.torch_nodes import TorchNode, torch_node
from ortlaunch.ort.mends.values import DTYPES, FLOATS, is_floating, number, sizes

_BOOL = 9
"""ONNX's code of the dtype."""
_MOST_TENSORS = 4
_TENSOR, _NUMBER = "tensor", "number"
"""Keys of an argument that is an input of the node, as a tensor or the whole number in it; the value is its index."""
_DEPENDS_ON_MODE = ("train", "training", "dropout_p", "generator")
"""Names of arguments of operators that draw random numbers or keep statistics."""
_COMPLEX = ("aten::fft_", "aten::stft", "aten::istft", "aten::polar", "aten::complex", "aten::view_as_complex")
"""Beginnings of the names of operators with complex arguments or results, which ONNX lacks."""
_WITHOUT_GRADIENT = {
    **dict.fromkeys(("aten::atan2", "aten::tensordot", "aten::outer")),
    "aten::einsum": "onnx::Einsum",
    **dict.fromkeys(("aten::det", "aten::linalg_det", "aten::logdet")),
    **dict.fromkeys(("aten::nll_loss", "aten::nll_loss2d", "aten::nll_loss_nd")),
    # The gradient of MaxPool writes out of bounds where a size of its input varies.
    **dict.fromkeys(("aten::max_pool1d", "aten::max_pool3d")),
    **dict.fromkeys(f"aten::max_pool{rank}d_with_indices" for rank in (1, 2, 3)),
}
"""Operators whose export has no gradient in onnxruntime 1.19.2, or a wrong one, or has none if it is the node that is
named."""
_CONSTANTS = {"int": "i", "float": "f", "bool": "b", "str": "s", "List[int]": "is", "List[float]": "fs"}
"""The exporter's letter for each type of a constant argument."""
_DTYPES = list(DTYPES)
_SIZES = (23, 29, 31, 37, 41, 43, 47, 53), (59, 61, 67, 71, 73, 79, 83, 89)
"""Two values for each of some symbols, with which the shape of a result is found."""
_LARGEST = 2**20
"""Elements of a tensor for which an operator is run to find the shape of its result."""


class _NotServedError(Exception):
    """A call cannot become a node; the text says why."""


def register() -> None:
    """Registers an export for each operator that has none; call it after all others are registered."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]
    from torch.onnx._internal import registration

    for name in _names():
        if not registration.registry.is_registered_op(name, OPSET):
            register_custom_op_symbolic(name, exported, OPSET)
    for name, kind in _WITHOUT_GRADIENT.items():
        in_part.replace(name, _Differentiable, partial(_Differentiable, without_gradient=kind))


def exported(g: Any, *arguments: Any, **_outputs: Any) -> Any:
    """Exports the operator that is being exported as a node that calls it.

    Args:
        g: the exporter's graph.
        *arguments: of the operator; graph values.

    Returns:
        The results in the graph: one value, or a list of several.

    Raises:
        UnsupportedOperatorError: the call cannot become a node.
    """
    from torch.onnx import errors

    try:
        return _called(g, arguments)
    except _NotServedError as error:
        # torch's own sentence names the operator; it lacks the reason.
        raise errors.UnsupportedOperatorError(f"{g.original_node.kind()} ({error})", OPSET, None) from error


def is_call(operator: str) -> bool:
    """Whether an operator of the graph is a node of this module, or its gradient."""
    return operator.startswith(("ortlaunch::call_", "ortlaunch::value_"))


def called(spelled: Sequence[int]) -> str:
    """Returns the operator of torch that a node calls, from the integers that spell the call."""
    name: str = json.loads(bytes(spelled))[0]
    return name


@dataclass(frozen=True)
class _Differentiable:
    """Exports an operator as it is exported without us where no gradient is needed, or where that has one."""

    original: Callable[..., Any]
    without_gradient: str | None
    """Kind of the node that has no gradient; None if the export never has one."""

    def __call__(self, g: Any, *arguments: Any, **rest: Any) -> Any:
        # The first one is the only one with a gradient; the others are indices.
        output = next(g.original_node.outputs())
        if not is_floating(output) or not output.requires_grad():
            return self.original(g, *arguments, **rest)
        if self.without_gradient is not None:
            result = self.original(g, *arguments, **rest)
            if result.node().kind() != self.without_gradient:
                return result
        return exported(g, *arguments)


def _called(g: Any, arguments: Sequence[Any]) -> Any:
    schema, others, tensors = _matched(g.original_node.kind(), arguments)
    outputs = list(g.original_node.outputs())
    results = [_result(g, schema, others, tensors, index, output) for index, output in enumerate(outputs)]
    return results[0] if len(results) == 1 else results


def _matched(name: str, arguments: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Returns the form of an operator that takes these arguments, the arguments for JSON, and the tensors in them.

    The exporter's graph does not say which form it was. A number is no tensor where there is a form for numbers.
    """
    forms = [form for form in _forms(name) if len(form.arguments) == len(arguments)]
    reason = _NotServedError("it changes an argument or draws random numbers")
    for form in sorted(forms, key=lambda form: sum("Tensor" in str(one.type) for one in form.arguments)):
        tensors: list[Any] = []
        try:
            others = [_other(value, kind.type, tensors) for value, kind in zip(arguments, form.arguments, strict=True)]
        except _NotServedError as error:
            reason = error
        else:
            return form, others, tensors
    raise reason


@cache
def _forms(name: str) -> tuple[Any, ...]:
    """Returns the schemas of an operator that can become a node."""
    forms = []
    for schema in filter(_is_served, torch._C._jit_get_schemas_for_operator(name)):
        operator = _operator(schema.name, schema.overload_name)
        if operator is not None and torch.Tag.nondeterministic_seeded not in operator.tags:
            forms.append(schema)
    return tuple(forms)


@cache
def _names() -> tuple[str, ...]:
    """Returns the names of torch's operators of which some form can become a node."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    return tuple(dict.fromkeys(schema.name for schema in schemas if _is_served(schema)))


def _operator(name: str, overload: str) -> Any | None:
    """Returns an operator of torch; None for one that only TorchScript has."""
    namespace, _, name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload or "default", None)


def _is_served(schema: Any) -> bool:
    arguments, returns = schema.arguments, schema.returns
    return (
        not schema.is_mutable
        and bool(returns)
        and all(str(result.type) == "Tensor" for result in returns)
        and any("Tensor" in str(argument.type) for argument in arguments)
        and not any(argument.name in _DEPENDS_ON_MODE for argument in arguments)
        and not schema.name.startswith(_COMPLEX)
    )


def _other(value: Any, kind: Any, tensors: list[Any]) -> Any:
    """Returns an argument for JSON; tensors are appended to `tensors`, and their indices stand for them."""
    from torch.onnx import symbolic_helper

    name = str(kind).removeprefix("Optional[").removesuffix("]") if str(kind).startswith("Optional[") else str(kind)
    if symbolic_helper._is_none(value):
        # The form of `std` with `unbiased` would take an omitted correction for False.
        if not str(kind).startswith("Optional["):
            raise _NotServedError(f"an argument of type {name} is None")
        return None
    if name == "Tensor":
        return {_TENSOR: _place(value, tensors)}
    if name in ("List[Tensor]", "List[Optional[Tensor]]"):
        if not symbolic_helper._is_packed_list(value):
            raise _NotServedError("the number of its tensors is unknown")
        inside = name.removeprefix("List[").removesuffix("]")
        return [_other(item, inside, tensors) for item in symbolic_helper._unpack_list(value)]
    if name == "number":
        known = symbolic_helper._maybe_get_const(value, "t")
        if isinstance(known, Tensor) and known.numel() == 1 and not known.is_complex():
            return known.item()
    elif name in _CONSTANTS:
        if symbolic_helper._is_packed_list(value) and not symbolic_helper._unpack_list(value):
            return []
        try:
            known = symbolic_helper._maybe_get_const(value, _CONSTANTS[name])
        except ValueError as error:
            # A tensor of several elements, for which the operator has another form.
            raise _NotServedError(f"an argument of type {name} is a tensor") from error
        if not isinstance(known, torch._C.Value):
            return known
        if name == "int" and value.type().scalarType() == "Long":
            return {_NUMBER: _place(value, tensors)}
    raise _NotServedError(f"an argument of type {name} is not a constant")


def _place(value: Any, tensors: list[Any]) -> int:
    """Returns the index of a tensor among those of the node; one that is new is appended."""
    # A node may have an input once only: both of its gradients would get one name.
    names = [one.debugName() for one in tensors]
    if value.debugName() in names:
        return names.index(value.debugName())
    tensors.append(value)
    return len(names)


def _result(g: Any, schema: Any, others: list[Any], tensors: list[Any], index: int, output: Any) -> Any:
    """Adds the node for one result of the operator."""
    kind = output.type().scalarType()
    rank = output.type().dim() if output.type().kind() == "TensorType" else None
    kinds = {tensor.type().scalarType() for tensor in tensors}
    if kind is None or rank is None or None in kinds:
        raise _NotServedError("a dtype or a number of dimensions is unknown")
    if any("Complex" in one for one in (kind, *kinds)):
        raise _NotServedError("ONNX has no complex numbers")
    floats = kinds.intersection(FLOATS)
    if kind in FLOATS and floats - {kind}:
        raise _NotServedError("its tensors have several floating-point dtypes")
    inputs, order = list(tensors), list(range(len(tensors)))
    first = next((place for place in order if tensors[place].type().scalarType() == kind), None)
    is_truth = kind == "Bool"
    if first is None or is_truth:
        # A node has the dtype of its first input; booleans come back as uint8, as they are passed.
        like = g.op("Constant", value_t=torch.tensor(0, dtype=torch.uint8)) if is_truth else number(g, 0, output)
        inputs, order = [like, *inputs], [-1, *order]
    else:
        order = [first, *(place for place in order if place != first)]
        inputs = [tensors[place] for place in order]
    if len(inputs) > _MOST_TENSORS:
        raise _NotServedError(f"it takes more than {_MOST_TENSORS} tensors")
    places = {place: at for at, place in enumerate(order)}
    kinds_in_order = [_DTYPES.index(one.type().scalarType()) for one in inputs]
    spelled = _spelled(schema, _moved(others, places), index, rank, kinds_in_order)
    node = (_CALLS if kind in FLOATS else _VALUES)[len(inputs)]
    shapes = [sizes(one) for one in inputs]
    # A convolution is exported only where the sizes of its weight are known, which may be computed from a parameter.
    is_known = all(None not in shape for shape in shapes)
    result = node(g, *inputs, spelled, dims=_shape(*shapes, spelled) if is_known else [None] * rank)
    return g.op("Cast", result, to_i=_BOOL) if is_truth else result


def _moved(others: Any, places: dict[int, int]) -> Any:
    if isinstance(others, list):
        return [_moved(other, places) for other in others]
    return {key: places[place] for key, place in others.items()} if isinstance(others, dict) else others


def _spelled(schema: Any, values: list[Any], result: int, rank: int, kinds: list[int]) -> list[int]:
    """Returns a call as integers, which an ATen node can pass; JSON keeps the bits of fp64 numbers."""
    pairs = list(zip(schema.arguments, values, strict=True))
    by_position = [value for argument, value in pairs if not argument.kwarg_only]
    by_name = {argument.name: value for argument, value in pairs if argument.kwarg_only and value is not None}
    call = [schema.name, schema.overload_name, by_position, by_name, result, rank, kinds]
    return list(json.dumps(call, separators=(",", ":")).encode())


@dataclass(frozen=True)
class _Call:
    """A call that a node spells."""

    operator: Callable[..., Any]
    by_position: list[Any]
    by_name: dict[str, Any]
    result: int
    """Which of several results the node returns."""
    rank: int
    """Dimensions of that result."""
    dtypes: list[torch.dtype]
    """Of the tensors; an ATen node passes booleans as uint8."""


@lru_cache(maxsize=4096)
def _read(spelled: tuple[int, ...]) -> _Call:
    name, overload, by_position, by_name, result, rank, kinds = json.loads(bytes(spelled))
    operator = _operator(name, overload)
    assert operator is not None
    return _Call(operator, by_position, by_name, result, rank, [DTYPES[_DTYPES[kind]] for kind in kinds])


def _filled(argument: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(argument, list):
        return [_filled(item, tensors) for item in argument]
    if isinstance(argument, dict):
        return tensors[argument[_TENSOR]] if _TENSOR in argument else int(tensors[argument[_NUMBER]])
    return argument


def _compute(*inputs: Any) -> Tensor:
    *tensors, spelled = inputs
    call = _read(tuple(spelled))
    pairs = zip(tensors, call.dtypes, strict=True)
    return _chosen(call, [x.bool() if kind is torch.bool else x for x, kind in pairs]).to(tensors[0].dtype)


def _chosen(call: _Call, tensors: Sequence[Tensor]) -> Tensor:
    named = {name: _filled(value, tensors) for name, value in call.by_name.items()}
    results = call.operator(*_filled(call.by_position, tensors), **named)
    chosen: Tensor = results if isinstance(results, Tensor) else results[call.result]
    return chosen


def _shape(*inputs: Any) -> list[Any]:
    """Returns the sizes of the result that follow from those of the tensors, by calls with two sets of sizes.

    ONNX Runtime takes two sizes of which it knows nothing for the same, and would not sum the gradient of what is
    broadcast, as the result of a reduction with ``keepdim``.
    """
    *shapes, spelled = inputs
    call = _read(tuple(spelled))
    symbols = sorted({one for shape in shapes for size in shape for one in getattr(size, "free_symbols", ())}, key=str)
    # Sizes that have two names may have to be the same; then only those that never vary are found.
    for values in (_SIZES, [[one[0]] * len(one) for one in _SIZES]):
        trials = [dict(zip(symbols, numbers, strict=False)) for numbers in values]
        results = [_tried(call, shapes, trial) for trial in trials] if len(symbols) <= len(values[0]) else [None]
        if all(sizes is not None and len(sizes) == call.rank for sizes in results):
            different = symbols if values is _SIZES else []
            return [_size(pair, different, trials) for pair in zip(*results, strict=True)]  # type: ignore[arg-type]
    return [None] * call.rank


def _tried(call: _Call, shapes: Sequence[Any], trial: dict[Any, int]) -> tuple[int, ...] | None:
    """Returns the shape of the result where symbols have these values; None if the operator does not take them.

    The result's shape may depend on values too, and some operators have no shape without a computation.
    """
    sizes = [[int(size.subs(trial)) if hasattr(size, "subs") else size for size in shape] for shape in shapes]
    # A shape that depends on values must not be taken from zeros: on counts and masks, or as with `nonzero`.
    depends = torch.Tag.dynamic_output_shape in getattr(call.operator, "tags", ())
    is_safe = not depends and all(kind.is_floating_point for kind in call.dtypes)
    fits = is_safe and all(math.prod(size) <= _LARGEST for size in sizes)
    for device in ("meta", "cpu") if fits else ("meta",):
        tensors = [torch.zeros(size, dtype=kind, device=device) for size, kind in zip(sizes, call.dtypes, strict=True)]
        with contextlib.suppress(Exception), torch.no_grad():
            return tuple(_chosen(call, tensors).shape)
    return None


def _size(pair: tuple[int, int], symbols: Sequence[Any], trials: Sequence[dict[Any, int]]) -> Any:
    """Returns the size that was one number and another one: a number, a symbol, or None."""
    if pair[0] == pair[1]:
        return pair[0]
    return next((one for one in symbols if pair == tuple(trial[one] for trial in trials)), None)


def _nodes(kind: str, has_gradient: bool) -> Iterator[tuple[int, TorchNode]]:
    for count in range(1, _MOST_TENSORS + 1):

        def compute(*inputs: Any) -> Tensor:
            return _compute(*inputs)

        compute.__name__ = f"{kind}_{count}"
        arguments = ", ".join([*(f"Tensor x{index}" for index in range(count)), "int[] spelled"])
        differentiable = tuple(range(count)) if has_gradient else ()
        yield count, torch_node(arguments, differentiable=differentiable, shape=_shape)(compute)


_CALLS = dict(_nodes("call", has_gradient=True))
"""By the number of tensors; the result is floating-point."""
_VALUES = dict(_nodes("value", has_gradient=False))
"""By the number of tensors; the result has no gradient."""
