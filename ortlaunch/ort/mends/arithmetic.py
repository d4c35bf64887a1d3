"""Elementwise operators, reductions, running sums and counts; PyTorch computes them and their gradients.

onnxruntime 1.19.2 and torch's exporter have these faults:

- ``a ** b``: the gradient of the exponent is omitted, in silence if it also has another way to the output. That of
  ``a ** 0`` is NaN where a is zero.
- ELU, Mish, PReLU, softplus, many transcendental functions, ``amax``, ``prod``, ``cumsum`` and others have no gradient
  on the CPU or are not exported. ``sign``, ``floor`` and the like have a gradient of zero, which is missing too.
- ``arange`` of numbers with a fraction: ONNX Runtime adds up the steps, and their rounding errors.
- Integers have no ``&``, ``|``, ``^`` and ``~``; ``histc``, ``bincount`` and grouped products are not exported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.ort.kernels.traced import number as constant_number
from ortlaunch.ort.mends import exporters, in_part, torch_calls
from ortlaunch.ort.mends.torch_nodes import exact, numbers, torch_node
from ortlaunch.ort.mends.values import DTYPES, cast, is_floating, number, sizes

_EXPORTED = ("sign", "floor", "ceil", "round")
"""These are replaced only where a gradient flows, because ONNX Runtime computes with sizes by them."""
_OF_INTEGERS = ("sign", "round", "trunc", "frac")
"""The exporter takes integers too; the result of all others has another dtype, or its node takes none."""
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in (*_EXPORTED, "trunc", "frac")},
    **{name: getattr(torch, name) for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh")},
    **{name: getattr(torch, name) for name in ("atanh", "expm1", "erfc", "erfinv", "lgamma", "digamma", "sinc", "i0")},
    **{name: getattr(functional, name) for name in ("hardswish", "hardsigmoid", "mish", "selu")},
}
_NAMES = tuple(_UNARY)
_PARAMETRIC = ("elu", "celu", "softplus", "threshold")
_REDUCTIONS = ("amax", "amin", "logsumexp")
_RUNNING = ("cumsum", "cumprod", "logcumsumexp")
_BITWISE = ("and", "or", "xor")


def _reduced(x: list[Any], _which: Any, dims: list[Any], keep: Any) -> list[Any]:
    axes = {axis % len(x) for axis in dims} if x else set()
    return [1 if axis in axes else size for axis, size in enumerate(x) if keep or axis not in axes]


def _broadcast(one: Any, other: Any, *_: Any) -> list[Any]:
    one, other = ([] if isinstance(shape, int) else list(shape) for shape in (one, other))
    shorter, longer = sorted((one, other), key=len)
    padded = [1] * (len(longer) - len(shorter)) + shorter
    return [b if a == 1 else a for a, b in zip(padded, longer, strict=True)]


@torch_node("Tensor x, int which", differentiable=(0,))
def _unary(x: Tensor, which: int) -> Tensor:
    return _UNARY[_NAMES[which]](x)


@torch_node("Tensor x, int which, int[] parameters", differentiable=(0,))
def _parametric(x: Tensor, which: int, parameters: list[int]) -> Tensor:
    operator = getattr(torch.ops.aten, _PARAMETRIC[which])
    result: Tensor = operator(x, *(numbers(parameters) or ()))
    return result


@torch_node("Tensor x, Tensor weight", differentiable=(0, 1))
def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    return functional.prelu(x, weight)


@torch_node("Tensor base, Tensor exponent", differentiable=(0, 1), shape=_broadcast)
def _pow(base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base, exponent)


@torch_node("Tensor x, int which, int[] dims, bool keep", differentiable=(0,), shape=_reduced)
def _reduce(x: Tensor, which: int, dims: list[int], keep: bool) -> Tensor:
    result: Tensor = getattr(torch, _REDUCTIONS[which])(x, dims, keep)
    return result


@torch_node("Tensor x, int[] order, int[] dims, bool keep", differentiable=(0,), shape=_reduced)
def _norm(x: Tensor, order: list[int], dims: list[int], keep: bool) -> Tensor:
    (power,) = numbers(order) or [2.0]
    result: Tensor = torch.linalg.vector_norm(x, power, dims, keep)
    return result


@torch_node(
    "Tensor x, int dim, bool keep",
    differentiable=(0,),
    shape=lambda x, dim, keep: _reduced(x, None, [dim], keep),
)
def _prod(x: Tensor, dim: int, keep: bool) -> Tensor:
    return torch.prod(x, dim, keep)


@torch_node("Tensor x, int which, int dim", differentiable=(0,))
def _running(x: Tensor, which: int, dim: int) -> Tensor:
    result: Tensor = getattr(torch, _RUNNING[which])(x, dim)
    return result


@torch_node("Tensor one, Tensor other, int which", shape=_broadcast)
def _bitwise(one: Tensor, other: Tensor, which: int) -> Tensor:
    result: Tensor = getattr(torch, f"bitwise_{_BITWISE[which]}")(one, other)
    return result


@torch_node("Tensor x")
def _bitwise_not(x: Tensor) -> Tensor:
    return torch.bitwise_not(x)


@torch_node("Tensor x, int bins, int[] limits", shape=lambda x, bins, limits: [bins])
def _histc(x: Tensor, bins: int, limits: list[int]) -> Tensor:
    least, most = numbers(limits) or (0.0, 0.0)
    return torch.histc(x, bins, least, most)


@torch_node("Tensor x, Tensor? weights, int least", shape=lambda *_: [None])
def _bincount(x: Tensor, weights: Tensor | None, least: int) -> Tensor:
    return torch.bincount(x, weights, least)


@torch_node(
    "Tensor one, Tensor other, Tensor? offsets, Tensor? bias",
    differentiable=(0, 1, 3),
    shape=lambda a, b, *_: [None] * max(2, len(a) + len(b) - 3),
)
def _grouped_mm(one: Tensor, other: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
    result: Tensor = torch._grouped_mm(one, other, offsets, bias)  # type: ignore[attr-defined]
    return result


@torch_node("Tensor like, Tensor start, Tensor end, Tensor step", shape=lambda *_: [None])
def _range(like: Tensor, start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=like.dtype, device=like.device)


def register() -> None:
    """Registers the symbolics; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    for name, symbolic in _SYMBOLICS.items():
        register_custom_op_symbolic(name, symbolic, 17)
    in_part.replace("aten::arange", _FractionalRange, _FractionalRange)


def register_standard() -> None:
    """Registers those symbolics that write standard ONNX operators, which any runtime has."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("aten::cumsum", _cumsum_symbolic, 17)


def _unary_symbolic(name: str, g: Any, x: Any, *rest: Any) -> Any:
    if not is_floating(x) and name not in _OF_INTEGERS:
        return torch_calls.exported(g, x, *rest)
    if name in _EXPORTED and not (is_floating(x) and x.requires_grad()):
        return exporters.symbolic(f"aten::{name}")(g, x, *rest)
    if rest:
        # round with decimals.
        return torch_calls.exported(g, x, *rest)
    return _unary(g, x, _NAMES.index(name))


def _parametric_symbolic(name: str, g: Any, x: Any, *parameters: Any) -> Any:
    from torch.onnx import symbolic_helper

    if not is_floating(x):
        return torch_calls.exported(g, x, *parameters)
    known = [symbolic_helper._get_const(parameter, "f", "parameter") for parameter in parameters]
    return _parametric(g, x, _PARAMETRIC.index(name), exact(known))


def _prelu_symbolic(g: Any, x: Any, weight: Any) -> Any:
    return _prelu(g, x, weight)


def _pow_symbolic(g: Any, base: Any, exponent: Any) -> Any:
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_constant(exponent) or not is_floating(exponent):
        known = symbolic_helper._maybe_get_const(exponent, "t")
        is_zero_nowhere = isinstance(known, Tensor) and bool((known != 0).all())
        if is_zero_nowhere or not (is_floating(base) and g.original_node.inputsAt(0).requires_grad()):
            return exporters.symbolic("aten::pow", 9)(g, base, exponent)
        shape = list(known.shape) if isinstance(known, Tensor) else sizes(exponent)
        exponent = cast(g, exponent, base)
        exponent.setType(base.type().with_sizes(shape))
    if not is_floating(base) or symbolic_helper._is_constant(base):
        base = cast(g, base, exponent)
    ranks = [symbolic_helper._get_tensor_rank(value) for value in (base, exponent)]
    dims = sizes(exponent) if ranks[0] in (None, 0) else [None] * max(rank or 0 for rank in ranks)
    return _pow(g, base, exponent, dims=dims)


def _dims(x: Any, dims: Any) -> list[int]:
    """Returns the dimensions that a reduction reduces; all if none are given."""
    from torch.onnx import symbolic_helper

    given = None if symbolic_helper._is_none(dims) else symbolic_helper._maybe_get_const(dims, "is")
    given = [given] if isinstance(given, int) else given
    return given or list(range(len(sizes(x))))


def _result_dims(x: Any, dims: list[int], keep: bool) -> list[int | None]:
    known = sizes(x)
    gone = {dim % max(len(known), 1) for dim in dims}
    if keep:
        return [1 if axis in gone else size for axis, size in enumerate(known)]
    return [size for axis, size in enumerate(known) if axis not in gone]


def _reduce_symbolic(name: str, g: Any, x: Any, dims: Any = None, keep: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    output = next(g.original_node.outputs())
    if is_floating(output) and not is_floating(x):
        x = cast(g, x, output)
        x.setType(g.original_node.inputsAt(0).type().with_dtype(DTYPES[output.type().scalarType()]))
    axes = _dims(x, dims)
    kept = keep is not None and bool(symbolic_helper._get_const(keep, "b", "keepdim"))
    return _reduce(g, x, _REDUCTIONS.index(name), axes, kept, dims=_result_dims(x, axes, kept))


def _aminmax_symbolic(g: Any, x: Any, dim: Any = None, keep: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    is_whole = dim is None or symbolic_helper._is_none(dim)
    dims = None if is_whole else g.op("Constant", value_t=torch.tensor([symbolic_helper._get_const(dim, "i", "dim")]))
    return tuple(_reduce_symbolic(name, g, x, dims, keep) for name in ("amin", "amax"))


def _norm_symbolic(g: Any, x: Any, order: Any, dims: Any = None, keep: Any = None, dtype: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    axes = _dims(x, dims)
    kept = keep is not None and bool(symbolic_helper._get_const(keep, "b", "keepdim"))
    power = 2.0 if symbolic_helper._is_none(order) else symbolic_helper._get_const(order, "f", "p")
    if dtype is not None and not symbolic_helper._is_none(dtype):
        from torch.onnx import _type_utils

        kind = _type_utils.JitScalarType(symbolic_helper._get_const(dtype, "i", "dtype"))
        x = g.op("Cast", x, to_i=kind.onnx_type())
    return _norm(g, x, exact([power]), axes, kept, dims=_result_dims(x, axes, kept))


def _prod_symbolic(g: Any, x: Any, *rest: Any) -> Any:
    from torch.onnx import symbolic_helper

    dim = symbolic_helper._get_const(rest[0], "i", "dim")
    keep = bool(symbolic_helper._get_const(rest[1], "b", "keepdim"))
    return _prod(g, x, dim, keep, dims=_result_dims(x, [dim], keep))


def _running_symbolic(name: str, g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """Exports a running sum or product by PyTorch's, which has a gradient."""
    from torch.onnx import symbolic_helper

    x = _of_running(g, x, dtype)
    if name == "cumsum" and not is_floating(x):
        return _cumsum(g, x, dim)
    return _running(g, x, _RUNNING.index(name), symbolic_helper._get_const(dim, "i", "dim"))


def _cumsum_symbolic(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    return _cumsum(g, _of_running(g, x, dtype), dim)


def _cumsum(g: Any, x: Any, dim: Any) -> Any:
    from torch.onnx import symbolic_helper

    axis = symbolic_helper._get_const(dim, "i", "dim")
    return g.op("CumSum", x, g.op("Constant", value_t=torch.tensor(axis)))


def _of_running(g: Any, x: Any, dtype: Any) -> Any:
    """Casts as torch does: to `dtype`, else integers and booleans to int64. ONNX's CumSum does neither."""
    from torch.onnx import _type_utils, symbolic_helper

    if dtype is not None and not symbolic_helper._is_none(dtype):
        kind = _type_utils.JitScalarType(symbolic_helper._get_const(dtype, "i", "dtype"))
    elif is_floating(x):
        return x
    else:
        kind = _type_utils.JitScalarType.INT64
    result = g.op("Cast", x, to_i=kind.onnx_type())
    result.setType(x.type().with_dtype(kind.dtype()))
    return result


def _bitwise_symbolic(name: str, g: Any, one: Any, other: Any) -> Any:
    from torch.onnx import symbolic_helper

    kinds = [value.type().scalarType() for value in (one, other)]
    if "Bool" in kinds:
        if kinds[0] != kinds[1]:
            # A Python number has the dtype of the tensor beside it.
            constant = [symbolic_helper._is_constant(value) for value in (one, other)]
            one, other = (
                cast(g, value, like) if is_number or kind == "Bool" else value
                for value, like, kind, is_number in (
                    (one, other, kinds[0], constant[0]),
                    (other, one, kinds[1], constant[1]),
                )
            )
        if all(value.type().scalarType() in ("Bool", None) for value in (one, other)):
            return g.op(name.capitalize(), one, other)
    elif symbolic_helper._is_constant(other):
        other = cast(g, other, one)
    elif symbolic_helper._is_constant(one):
        one = cast(g, one, other)
    ranks = [symbolic_helper._get_tensor_rank(value) or 0 for value in (one, other)]
    return _bitwise(g, one, other, _BITWISE.index(name), dims=[None] * max(ranks))


def _bitwise_not_symbolic(g: Any, x: Any) -> Any:
    return g.op("Not", x) if x.type().scalarType() == "Bool" else _bitwise_not(g, x)


def _histc_symbolic(g: Any, x: Any, bins: Any, least: Any, most: Any) -> Any:
    from torch.onnx import symbolic_helper

    count = symbolic_helper._get_const(bins, "i", "bins")
    limits = [symbolic_helper._get_const(limit, "f", "limit") for limit in (least, most)]
    return _histc(g, x, count, exact(limits), dims=[count])


def _bincount_symbolic(g: Any, x: Any, weights: Any, least: Any) -> Any:
    from torch.onnx import symbolic_helper

    given = None if symbolic_helper._is_none(weights) else weights
    return _bincount(g, x, given, least, dims=[None])


def _grouped_mm_symbolic(
    g: Any, one: Any, other: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    from torch.onnx import symbolic_helper

    ranks = [symbolic_helper._get_tensor_rank(value) for value in (one, other)]
    dims = [None] * max(2, sum(ranks) - 3)
    extra = [None if value is None or symbolic_helper._is_none(value) else value for value in (offsets, bias)]
    return _grouped_mm(g, one, other, *extra, dims=dims)


@dataclass(frozen=True)
class _FractionalRange:
    """Exports ``arange``: by PyTorch's where the first number or the step has a fraction, or may have one."""

    original: Callable[..., Any]

    def __call__(self, g: Any, *arguments: Any) -> Any:
        from torch.onnx import TensorProtoDataType

        output = g.original_node.output()
        given = arguments[: len(arguments) - len(("dtype", "layout", "device", "pin_memory"))]
        zero, one = (g.op("Constant", value_t=torch.tensor(value)) for value in (0, 1))
        limits = {1: (zero, *given, one), 2: (*given, one)}.get(len(given), given)
        first, _, step = map(constant_number, limits)
        are_whole = all(known is not None and known.is_integer() for known in (first, step))
        if are_whole or not is_floating(output):
            return self.original(g, *arguments)
        doubles = [g.op("Cast", limit, to_i=TensorProtoDataType.DOUBLE) for limit in limits]
        return _range(g, number(g, 0, output), *doubles, dims=[None])


def _transposed(g: Any, x: Any) -> Any:
    """Exports ``mT``, ``mH`` and ``H`` of real matrices: the last two dimensions change places."""
    axes = list(range(len(sizes(x))))
    axes[-2:] = axes[:-3:-1]
    return g.op("Transpose", x, perm_i=axes)


def _unsafe_chunk_symbolic(g: Any, x: Any, chunks: Any, dim: Any, _outputs: int | None = None) -> Any:
    """Exports ``unsafe_chunk`` for sizes that vary."""
    from torch.onnx import errors, symbolic_helper

    count = symbolic_helper._get_const(chunks, "i", "chunks")
    axis = symbolic_helper._get_const(dim, "i", "dim")
    if _outputs is None:
        raise errors.SymbolicValueError("unsafe_chunk into an unknown number of parts is not exported", x)
    size = _size(g, x, axis)
    part = g.op("Div", g.op("Add", size, _whole(g, count - 1)), _whole(g, count))
    return _split_evenly(g, x, part, axis, _outputs)


def _split_symbolic(g: Any, x: Any, part: Any, dim: Any, _outputs: int | None = None) -> Any:
    """Exports ``split`` into parts of one size; the exporter takes the last one for as long as the others."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(part, "i")
    lasts = [output.type().sizes() for output in list(g.original_node.outputs())[-1:]]
    axis = symbolic_helper._get_const(dim, "i", "dim")
    is_even = bool(lasts) and lasts[0] is not None and lasts[0][axis] == known
    if _outputs is None or not isinstance(known, int) or is_even:
        return exporters.symbolic("aten::split")(g, x, part, dim, _outputs)
    return _split_evenly(g, x, _whole(g, known), axis, _outputs)


def _tensor_split_symbolic(g: Any, x: Any, given: Any, dim: Any, _outputs: int | None = None) -> Any:
    """Exports ``tensor_split``, of which the exporter makes a sequence or fails."""
    from torch.onnx import errors, symbolic_helper

    known = symbolic_helper._maybe_get_const(given, "t")
    places = known.tolist() if isinstance(known, Tensor) else known
    if symbolic_helper._is_packed_list(given):
        places = [symbolic_helper._get_const(place, "i", "place") for place in symbolic_helper._unpack_list(given)]
    axis = symbolic_helper._get_const(dim, "i", "dim") % len(sizes(x))
    if isinstance(places, int):
        counts = g.op("Add", _size(g, x, axis), g.op("Constant", value_t=torch.arange(places - 1, -1, -1)))
        parts = g.op("Split", x, g.op("Div", counts, _whole(g, places)), axis_i=axis, outputs=places)
        parts = [parts] if places == 1 else list(parts)
    elif isinstance(places, list):
        ends = zip([0, *places], [*places, 2**63 - 1], strict=True)
        parts = [symbolic_helper._slice_helper(g, x, axes=[axis], starts=[start], ends=[end]) for start, end in ends]
    else:
        raise errors.SymbolicValueError("tensor_split at places that depend on the input is not exported", x)
    return parts if _outputs is not None else g.op("prim::ListConstruct", *parts)


def _split_evenly(g: Any, x: Any, part: Any, axis: int, count: int) -> Any:
    """Splits into parts of one size, of which the last one may be smaller."""
    last = g.op("Sub", _size(g, x, axis), g.op("Mul", part, _whole(g, count - 1)))
    return g.op("Split", x, g.op("Concat", *[part] * (count - 1), last, axis_i=0), axis_i=axis, outputs=count)


def _size(g: Any, x: Any, axis: int) -> Any:
    return g.op("Gather", g.op("Shape", x), _whole(g, axis), axis_i=0)


def _whole(g: Any, value: int) -> Any:
    return g.op("Constant", value_t=torch.tensor([value]))


_SYMBOLICS = {
    **{f"aten::{name}": partial(_unary_symbolic, name) for name in _UNARY},
    **{f"aten::{name}": partial(_parametric_symbolic, name) for name in _PARAMETRIC},
    "aten::prelu": _prelu_symbolic,
    "aten::pow": _pow_symbolic,
    **{f"aten::{name}": partial(_reduce_symbolic, name) for name in _REDUCTIONS},
    "aten::aminmax": _aminmax_symbolic,
    "aten::norm": _norm_symbolic,
    "aten::linalg_vector_norm": _norm_symbolic,
    "aten::prod": _prod_symbolic,
    **{f"aten::{name}": partial(_running_symbolic, name) for name in _RUNNING},
    **{f"aten::__{name}_": partial(_bitwise_symbolic, name) for name in _BITWISE},
    **{f"aten::__i{name}_": partial(_bitwise_symbolic, name) for name in _BITWISE},
    **{f"aten::bitwise_{name}": partial(_bitwise_symbolic, name) for name in _BITWISE},
    "aten::bitwise_not": _bitwise_not_symbolic,
    "aten::histc": _histc_symbolic,
    "aten::bincount": _bincount_symbolic,
    "aten::_grouped_mm": _grouped_mm_symbolic,
    "aten::mT": _transposed,
    "aten::mH": _transposed,
    "aten::matrix_H": _transposed,
    "aten::unsafe_chunk": _unsafe_chunk_symbolic,
    "aten::split": _split_symbolic,
    "aten::tensor_split": _tensor_split_symbolic,
    "aten::unsafe_split": _split_symbolic,
}
