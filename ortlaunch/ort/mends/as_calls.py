"""Operators that torch's exporter has, but whose export fails or is wrong in some forms, as calls of PyTorch.

- ``cdist``: the exporter's shapes are wrong for p=1, and building the gradient fails where both tensors are the same.
- ``repeat_interleave`` with a tensor of counts: a sequence, which ORTModule's inference of shapes does not know.
- ``pairwise_distance``: the exporter takes powers of negative numbers, and adds the epsilon to the exponent.
- ``prod`` of all elements, or of integers.
- ``sort`` and ``argsort`` with ``stable``: the exporter takes it for the dimension.
- ``flip``: its gradient fails where the size of a flipped dimension is known.
- ``grid_sample``: it has no gradient.
- ``maximum``, ``minimum`` and ``add`` of booleans, ``argmin`` of integers: ONNX Runtime has none. The gradients of
  ``maximum`` and ``minimum`` of two tensors in fp16 are not finite.
- Arithmetic, comparisons, choices and sorting of integers of 8 or 16 bits: ONNX Runtime has none for most, and the
  exporter compares with a number that such an integer cannot have without wrapping it, as PyTorch does.
- ``sum`` and ``mean`` over a dimension of a tensor without dimensions: ORTModule's inference of shapes fails,
  and so it does for a ``sum`` over an empty list of dimensions, which means all.
- ``std``: where all values are the same, the gradient of its root is NaN; PyTorch's is zero.
- ``cosine_similarity``: of a vector of zeros its gradient is NaN, and the epsilon bounds the product of both norms.
- ``exp``, ``sin`` and the like of integers: the exporter casts nothing. Neither for ``atan2`` of two.
- ``sin``, ``relu``, ``softmax``, matrix products and others in fp64, and ``cat`` with a gradient: ONNX Runtime has no
  kernel on the CPU for them or for their gradients. It has ``erf`` for fp32 alone.
- ``max_pool2d`` and ``avg_pool2d`` of one image without a batch: ONNX's operators take three dimensions for a series.
- ``linalg.matrix_norm`` and ``linalg.norm``: where all values are zero, the gradient is NaN; PyTorch's is zero.
- ``clamp`` to tensors: a limit of one element gets no gradient, and at a limit the gradient is the limit's, too.
- ``clamp`` of integers to numbers with a fraction: the exporter cuts the fractions off.
- ``einsum`` of operands that are broadcast along a label, or to a number: the exporter fails.
- ``leaky_relu`` with a negative slope: the gradient goes by the sign of the result.
- ``topk``: of equal values ONNX Runtime takes others, so that gradients reach other elements.
- ``unique``: the indices of the values have lost their dimensions.
- ``pow`` of integers: where PyTorch's wraps, ONNX Runtime's is the least integer.
- ``roll`` by more than a size, by which the exporter leaves elements where they are. Of the first dimension a later
  batch may have fewer than the traced one.
- ``pad`` around a circle with a width below zero, which cuts off: the exporter repeats other elements.
- Packing and padding of sequences, for which ONNX has no operator.
- ``fake_quantize_per_tensor_affine``: ONNX Runtime wants its zero point as an initializer, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ortlaunch.ort.kernels.traced import integers
from ortlaunch.ort.mends import in_part, torch_calls
from ortlaunch.ort.mends.values import is_floating


def register() -> None:
    """Registers the symbolics; call it after those that they replace in part."""
    for name, is_served in _FORMS.items():
        in_part.replace(name, _InPart, partial(_InPart, is_served=is_served))
    in_part.replace("aten::einsum", _Contracted, _Contracted)


@dataclass(frozen=True)
class _InPart:
    """Exports some forms of an operator as a call, and the others as without us."""

    original: Callable[..., Any]
    is_served: Callable[..., bool]

    def __call__(self, g: Any, *arguments: Any, **outputs: Any) -> Any:
        if self.is_served(*arguments):
            return torch_calls.exported(g, *arguments)
        return self.original(g, *arguments, **outputs)


@dataclass(frozen=True)
class _Contracted:
    """Exports ``einsum`` as a call where an operand is broadcast along a label, in fp64, or to a number."""

    original: Callable[..., Any]

    def __call__(self, g: Any, equation: Any, tensors: Any, *rest: Any) -> Any:
        from torch.onnx import symbolic_helper

        text = symbolic_helper._get_const(equation, "s", "equation").replace(" ", "")
        labels = text.split("->")[0].split(",")
        found: dict[str, set[int]] = {}
        for names, operand in zip(labels, g.original_node.inputsAt(1).node().inputs(), strict=False):
            for name, size in zip(names, operand.type().sizes() or (), strict=False):
                found.setdefault(name, set()).add(size)
        # The exporter leaves those with an ellipsis to an operator without a gradient, which is a call anyway.
        is_broadcast = any(len(known) > 1 for known in found.values()) and "..." not in text
        parts = symbolic_helper._unpack_list(tensors)
        if is_broadcast or text.endswith("->") or _has_doubles(*parts):
            return torch_calls.exported(g, equation, tensors, *rest)
        return self.original(g, equation, tensors, *rest)


def _has_counts(_values: Any, repeats: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    is_known = symbolic_helper._is_constant(repeats) and symbolic_helper._get_tensor_rank(repeats) == 0
    return not is_known and repeats.type().kind() == "TensorType" and symbolic_helper._get_tensor_rank(repeats) == 1


def _is_of_all(values: Any, *rest: Any) -> bool:
    return len(rest) != 3 or not is_floating(values)


def _is_any(*_arguments: Any) -> bool:
    return True


def _has_gradient(values: Any, *_rest: Any) -> bool:
    return is_floating(values)


def _has_integers(*arguments: Any) -> bool:
    return not any(is_floating(one) for one in arguments)


def _has_doubles(*arguments: Any) -> bool:
    return "Double" in _kinds(arguments)


def _has_integers_or_doubles(*arguments: Any) -> bool:
    return _has_integers(*arguments) or _has_doubles(*arguments)


def _is_not_single(values: Any) -> bool:
    return _kinds((values,)) != ["Float"]


def _joins_doubles(tensors: Any, *_dim: Any) -> bool:
    from torch.onnx import symbolic_helper

    parts = symbolic_helper._unpack_list(tensors) if symbolic_helper._is_packed_list(tensors) else []
    return any(_has_doubles(one) and one.requires_grad() for one in parts)


def _has_no_batch(values: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return symbolic_helper._get_tensor_rank(values) == 3


def _has_no_dimensions(values: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return symbolic_helper._get_tensor_rank(values) == 0


def _is_stable_or_small(values: Any, *rest: Any) -> bool:
    has_stable = len(rest) == len(("stable", "dim", "descending"))
    return has_stable or has_small_integers(values) or _kinds((values,)) == ["Bool"]


def _kinds(arguments: tuple[Any, ...]) -> list[str | None]:
    """Returns the dtypes of the tensors among the arguments, by the exporter's names."""
    return [one.type().scalarType() for one in arguments if one.type().kind() == "TensorType"]


def _are_truths(one: Any, other: Any = None, *_alpha: Any) -> bool:
    return other is not None and _kinds((one, other)) == ["Bool", "Bool"]


def has_small_integers(*arguments: Any) -> bool:
    """Whether a tensor among the arguments has integers of 8 or 16 bits."""
    return not _SMALL.isdisjoint(_kinds(arguments))


def _are_truths_or_small(*arguments: Any) -> bool:
    return _are_truths(*arguments[:2]) or has_small_integers(*arguments)


def _are_truths_small_or_half(*arguments: Any) -> bool:
    return _are_truths_or_small(*arguments) or (len(arguments) == 2 and "Half" in _kinds(arguments))


def _is_choice_of_truths_or_small(*choices: Any) -> bool:
    return has_small_integers(*choices) or set(_kinds(choices)) == {"Bool"}


def _is_of_integers(values: Any, *_rest: Any) -> bool:
    return not is_floating(values)


def _is_sum_of_all(values: Any, dims: Any = None, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    if _has_no_dimensions(values):
        return True
    is_empty_list = symbolic_helper._is_packed_list(dims) and not symbolic_helper._unpack_list(dims)
    return is_empty_list or (dims is not None and integers(dims) == [])


def _has_other_limits(values: Any, *limits: Any) -> bool:
    from torch.onnx import symbolic_helper

    given = [limit for limit in limits if not symbolic_helper._is_none(limit)]
    if not is_floating(values):
        return any(map(is_floating, given)) or _is_choice_of_truths_or_small(values)
    # The number of dimensions of a size is unknown.
    return not all(not symbolic_helper._get_tensor_rank(limit) and not limit.requires_grad() for limit in given)


def _is_whole_power(base: Any, exponent: Any) -> bool:
    from torch.onnx import symbolic_helper

    # ONNX Runtime computes with sizes, which are numbers, and its inference of shapes follows them.
    are_whole = not is_floating(base) and not is_floating(exponent)
    return has_small_integers(base, exponent) or (
        are_whole and any(symbolic_helper._get_tensor_rank(one) for one in (base, exponent))
    )


def _cuts_off(_values: Any, widths: Any, mode: Any, *_value: Any) -> bool:
    from torch.onnx import symbolic_helper

    is_circular = symbolic_helper._maybe_get_const(mode, "s") == "circular"
    return is_circular and any(width < 0 for width in integers(widths) or ())


def _turns_over(values: Any, shifts: Any, dims: Any = None, *_rest: Any) -> bool:
    steps, axes, sizes = integers(shifts), integers(dims), values.type().sizes()
    if not steps or not axes or not sizes:
        return True
    most = [1, *(size or 0 for size in sizes[1:])]
    return any(abs(step) > most[axis] for step, axis in zip(steps, axes, strict=False))


def _is_falling_or_double(values: Any, slope: Any) -> bool:
    from torch.onnx import symbolic_helper

    if _has_doubles(values):
        return True
    known = symbolic_helper._maybe_get_const(slope, "f")
    return isinstance(known, float) and known < 0.0


def _has_known_count(values: Any, count: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return (is_floating(values) or has_small_integers(values)) and symbolic_helper._is_constant(count)


_OF_FLOATS = (
    *("exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "tanh"),
    *("atan2", "square"),
)
_NOT_OF_DOUBLES = ("sin", "cos", "relu", "softmax", "log_softmax")
"""Neither are these of integers."""
_SMALL = frozenset(("Byte", "Char", "Short"))
"""The exporter's names of the integers of 8 and 16 bits."""
_OF_SMALL = (
    *("sub", "rsub", "mul", "remainder", "fmod", "diff", "bitwise_left_shift", "__lshift_"),
    *("eq", "ne", "lt", "le", "gt", "ge", "cumsum", "cumprod", "neg"),
    *("tril", "triu"),
)
_FORMS: dict[str, Callable[..., bool]] = {
    **{f"aten::{name}": has_small_integers for name in _OF_SMALL},
    **{f"aten::{name}": _has_integers for name in _OF_FLOATS},
    **{f"aten::{name}": _has_integers_or_doubles for name in _NOT_OF_DOUBLES},
    **{f"aten::{name}": _has_doubles for name in ("matmul", "bmm", "mm", "baddbmm")},
    **{f"aten::{name}": _joins_doubles for name in ("cat", "stack", "hstack", "vstack")},
    **{f"aten::{name}": _has_no_batch for name in ("max_pool2d", "max_pool2d_with_indices", "avg_pool2d")},
    "aten::erf": _is_not_single,
    "aten::_unique2": _is_any,
    **dict.fromkeys(("aten::clamp", "aten::clamp_min", "aten::clamp_max"), _has_other_limits),
    "aten::leaky_relu": _is_falling_or_double,
    "aten::topk": _has_known_count,
    **dict.fromkeys(("aten::linalg_norm", "aten::linalg_matrix_norm", "aten::frobenius_norm"), _is_any),
    "aten::cosine_similarity": _is_any,
    "aten::std": _is_any,
    "aten::std_mean": _is_any,
    "aten::cdist": _is_any,
    "aten::fake_quantize_per_channel_affine": _is_any,
    "aten::fake_quantize_per_tensor_affine": _is_any,
    "aten::repeat_interleave": _has_counts,
    "aten::prod": _is_of_all,
    "aten::flip": _has_gradient,
    "aten::grid_sampler": _has_gradient,
    "aten::add": _are_truths_or_small,
    **dict.fromkeys(("aten::max", "aten::min", "aten::maximum", "aten::minimum"), _are_truths_small_or_half),
    "aten::argmin": _is_of_integers,
    "aten::masked_fill": lambda values, *_rest: _is_choice_of_truths_or_small(values),
    "aten::where": lambda _condition, *choices: bool(choices) and _is_choice_of_truths_or_small(*choices),
    "aten::mean": _has_no_dimensions,
    "aten::pow": _is_whole_power,
    "aten::pad": _cuts_off,
    "aten::roll": _turns_over,
    **dict.fromkeys(("aten::_pack_padded_sequence", "aten::_pad_packed_sequence"), _is_any),
    "aten::pairwise_distance": _is_any,
    "aten::sum": _is_sum_of_all,
    "aten::argsort": _is_stable_or_small,
    "aten::sort": _is_stable_or_small,
}
