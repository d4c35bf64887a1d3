"""Operators that torch's exporter has, but whose export fails or is wrong in some forms, as calls of PyTorch.

- ``cdist``: the exporter's shapes are wrong for p=1, and building the gradient fails where both tensors are the same.
- ``repeat_interleave`` with a tensor of counts: a sequence, which ORTModule's inference of shapes does not know.
- ``pairwise_distance``: the exporter takes powers of negative numbers, and adds the epsilon to the exponent.
- ``prod`` of all elements, or of integers.
- ``sort`` and ``argsort`` with ``stable``: the exporter takes it for the dimension.
- ``flip``: its gradient fails where the size of a flipped dimension is known.
- ``grid_sample``: it has no gradient.
- ``maximum`` and ``minimum`` of booleans: ONNX Runtime has none.
- ``sum`` and ``mean`` over a dimension of a tensor without dimensions: ORTModule's inference of shapes fails.
- ``std``: where all values are the same, the gradient of its root is NaN; PyTorch's is zero.
- ``cosine_similarity``: of a vector of zeros its gradient is NaN, and the epsilon bounds the product of both norms.
- ``exp``, ``sin`` and the like of integers: the exporter casts nothing. Neither for ``atan2`` of two.
- ``linalg.matrix_norm`` and ``linalg.norm``: where all values are zero, the gradient is NaN; PyTorch's is zero.
- ``clamp`` to tensors: a limit of one element gets no gradient, and at a limit the gradient is the limit's, too.
- ``einsum`` of operands that are broadcast along a label, or to a number: the exporter fails.
- ``leaky_relu`` with a negative slope: the gradient goes by the sign of the result.
- ``topk``: of equal values ONNX Runtime takes others, so that gradients reach other elements.
- ``unique``: the indices of the values have lost their dimensions.
- ``fake_quantize_per_tensor_affine``: ONNX Runtime wants its zero point as an initializer, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """Exports ``einsum`` as a call where an operand is broadcast along a label, or the result is a number."""

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
        if is_broadcast or text.endswith("->"):
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


def _has_no_dimensions(values: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return symbolic_helper._get_tensor_rank(values) == 0


def _has_stable(*arguments: Any) -> bool:
    return len(arguments) == len(("values", "stable", "dim", "descending"))


def _are_truths(*arguments: Any) -> bool:
    return len(arguments) == 2 and all(one.type().scalarType() == "Bool" for one in arguments)


def _has_tensor_limits(values: Any, *limits: Any) -> bool:
    from torch.onnx import symbolic_helper

    given = [limit for limit in limits if not symbolic_helper._is_none(limit)]
    # The number of dimensions of a size is unknown.
    is_number = [not symbolic_helper._get_tensor_rank(limit) and not limit.requires_grad() for limit in given]
    return is_floating(values) and not all(is_number)


def _is_falling(_values: Any, slope: Any) -> bool:
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(slope, "f")
    return isinstance(known, float) and known < 0.0


def _has_known_count(values: Any, count: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return is_floating(values) and symbolic_helper._is_constant(count)


_OF_FLOATS = (
    *("exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "erf", "relu"),
    *("atan2", "square", "softmax", "log_softmax"),
)
_FORMS: dict[str, Callable[..., bool]] = {
    **{f"aten::{name}": _has_integers for name in _OF_FLOATS},
    "aten::_unique2": _is_any,
    **dict.fromkeys(("aten::clamp", "aten::clamp_min", "aten::clamp_max"), _has_tensor_limits),
    "aten::leaky_relu": _is_falling,
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
    **dict.fromkeys(("aten::max", "aten::min", "aten::maximum", "aten::minimum"), _are_truths),
    "aten::mean": _has_no_dimensions,
    "aten::pairwise_distance": _is_any,
    "aten::sum": _has_no_dimensions,
    "aten::argsort": _has_stable,
    "aten::sort": _has_stable,
}
