"""Operators that PyTorch computes and differentiates, although torch's exporter has them: one row for each reason.

An operator that the exporter lacks needs no row. A row says when an operator is exported as a call of PyTorch
(`torch_calls`), and what is wrong with its nodes in onnxruntime 1.19.2, or with the exporter. In other forms it is
exported as without the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ortlaunch.ort.operators import exporter, torch_calls
from ortlaunch.ort.operators.arithmetic import is_signless
from ortlaunch.ort.operators.traced import integers
from ortlaunch.ort.operators.values import is_floating, kinds_of


class Row(NamedTuple):
    """A reason why PyTorch computes operators."""

    names: str
    """Of the operators, without ``aten::``, with spaces between them."""
    when: Callable[..., bool]
    """Whether a call is meant. It takes the operator's node in the trace and the call's arguments in the graph."""
    why: str


def register() -> None:
    """Registers the rows; call it after the symbolics that they replace in part."""
    reasons: dict[str, list[Callable[..., bool]]] = {}
    for row in ROWS:
        for name in row.names.split():
            reasons.setdefault(name, []).append(row.when)
    for name, of_operator in reasons.items():
        exporter.replace(f"aten::{name}", _Called, partial(_Called, reasons=tuple(of_operator)))


@dataclass(frozen=True)
class _Called:
    """Exports some forms of an operator as a call, and the others as without us."""

    original: Callable[..., Any]
    reasons: tuple[Callable[..., bool], ...]

    def __call__(self, g: Any, *arguments: Any, **outputs: Any) -> Any:
        if any(when(g.original_node, *arguments) for when in self.reasons):
            return torch_calls.exported(g, *arguments)
        result = self.original(g, *arguments, **outputs)
        # It depends on the equation whether the exporter writes ONNX's operator, which has no gradient.
        is_einsum = not isinstance(result, list | tuple) and result.node().kind() == "onnx::Einsum"
        return torch_calls.exported(g, *arguments) if is_einsum and _trains(g.original_node) else result


def has_small_integers(*arguments: Any) -> bool:
    """Whether a tensor among the arguments has integers of 8 or 16 bits."""
    return not _SMALL.isdisjoint(kinds_of(arguments))


def _always(_node: Any, *_arguments: Any) -> bool:
    return True


def _trains(node: Any, *_arguments: Any) -> bool:
    """The first result is the only one with a gradient; the others are indices."""
    output = next(node.outputs())
    return is_floating(output) and bool(output.requires_grad())


def _of_floats(_node: Any, values: Any, *_rest: Any) -> bool:
    return is_floating(values)


def _of_integers(_node: Any, values: Any, *_rest: Any) -> bool:
    return not is_floating(values)


def _to_floats(node: Any, *_arguments: Any) -> bool:
    return is_floating(next(node.outputs()))


def _of_integers_alone(_node: Any, *arguments: Any) -> bool:
    return not any(is_floating(one) for one in arguments)


def _of_small_integers(_node: Any, *arguments: Any) -> bool:
    return has_small_integers(*arguments)


def _of_doubles(_node: Any, *arguments: Any) -> bool:
    return "Double" in kinds_of(arguments)


def _of_one_truth(_node: Any, values: Any, *_rest: Any) -> bool:
    return kinds_of((values,)) == ["Bool"]


def _of_truths(_node: Any, one: Any, other: Any = None, *_alpha: Any) -> bool:
    return other is not None and kinds_of((one, other)) == ["Bool", "Bool"]


def _of_two_halves(_node: Any, *arguments: Any) -> bool:
    return len(arguments) == 2 and "Half" in kinds_of(arguments)


def _of_no_dimensions(_node: Any, values: Any, *_rest: Any) -> bool:
    return _rank(values) == 0


def _of_one_image(_node: Any, values: Any, *_rest: Any) -> bool:
    return _rank(values) == 3


def _is_not_single(_node: Any, values: Any) -> bool:
    return kinds_of((values,)) != ["Float"]


def _joins_doubles(node: Any, tensors: Any, *_dim: Any) -> bool:
    return any(_of_doubles(node, one) and one.requires_grad() for one in _unpacked(tensors))


def _contracts(node: Any, equation: Any, tensors: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    text = symbolic_helper._get_const(equation, "s", "equation").replace(" ", "")
    found: dict[str, set[int]] = {}
    for names, operand in zip(text.split("->")[0].split(","), node.inputsAt(1).node().inputs(), strict=False):
        for name, size in zip(names, operand.type().sizes() or (), strict=False):
            found.setdefault(name, set()).add(size)
    # The exporter leaves those with an ellipsis to ONNX's Einsum.
    is_broadcast = any(len(known) > 1 for known in found.values()) and "..." not in text
    return is_broadcast or text.endswith("->") or _of_doubles(node, *_unpacked(tensors))


def _has_counts(_node: Any, _values: Any, repeats: Any, *_rest: Any) -> bool:
    return repeats.type().kind() == "TensorType" and _rank(repeats) == 1


def _has_stable(_node: Any, _values: Any, *rest: Any) -> bool:
    return len(rest) == len(("stable", "dim", "descending"))


def _has_decimals(_node: Any, _values: Any, *decimals: Any) -> bool:
    return bool(decimals)


def _chooses_truths(_node: Any, *choices: Any) -> bool:
    return set(kinds_of(choices)) == {"Bool"}


def _chooses(_node: Any, _condition: Any, *choices: Any) -> bool:
    return bool(choices) and (has_small_integers(*choices) or _chooses_truths(_node, *choices))


def _fills(_node: Any, values: Any, *_rest: Any) -> bool:
    return has_small_integers(values) or _chooses_truths(_node, values)


def _is_over_no_list(_node: Any, _values: Any, dims: Any = None, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    is_empty_list = symbolic_helper._is_packed_list(dims) and not _unpacked(dims)
    return is_empty_list or (dims is not None and integers(dims) == [])


def _has_other_limits(_node: Any, values: Any, *limits: Any) -> bool:
    from torch.onnx import symbolic_helper

    given = [limit for limit in limits if not symbolic_helper._is_none(limit)]
    if not is_floating(values):
        return any(map(is_floating, given)) or _fills(_node, values)
    # The number of dimensions of a size is unknown.
    return not all(not _rank(limit) and not limit.requires_grad() for limit in given)


def _is_whole_power(_node: Any, base: Any, exponent: Any) -> bool:
    # ONNX Runtime computes with sizes, which are numbers, and its inference of shapes follows them.
    are_whole = not is_floating(base) and not is_floating(exponent)
    return has_small_integers(base, exponent) or (are_whole and any(map(_rank, (base, exponent))))


def _has_learnt_exponent(node: Any, base: Any, exponent: Any) -> bool:
    from torch.onnx import symbolic_helper

    if not symbolic_helper._is_constant(exponent) and is_floating(exponent):
        return True
    known = symbolic_helper._maybe_get_const(exponent, "t")
    is_zero_nowhere = isinstance(known, Tensor) and bool((known != 0).all())
    return not is_zero_nowhere and is_floating(base) and bool(node.inputsAt(0).requires_grad())


def _mode(given: Any) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._maybe_get_const(given, "s")


def _repeats_edges(_node: Any, _values: Any, _widths: Any, mode: Any, *_value: Any) -> bool:
    return _mode(mode) in ("reflect", "replicate")


def _cuts_off(_node: Any, _values: Any, widths: Any, mode: Any, *_value: Any) -> bool:
    return _mode(mode) == "circular" and any(width < 0 for width in integers(widths) or ())


def _turns_over(_node: Any, values: Any, shifts: Any, dims: Any = None, *_rest: Any) -> bool:
    steps, axes, sizes = integers(shifts), integers(dims), values.type().sizes()
    if not steps or not axes or not sizes:
        return True
    # Of the first dimension a later batch may have fewer than the traced one.
    most = [1, *(size or 0 for size in sizes[1:])]
    return any(abs(step) > most[axis] for step, axis in zip(steps, axes, strict=False))


def _falls(_node: Any, _values: Any, slope: Any) -> bool:
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(slope, "f")
    return isinstance(known, float) and known < 0.0


def _has_known_count(_node: Any, values: Any, count: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return (is_floating(values) or has_small_integers(values)) and symbolic_helper._is_constant(count)


def _is_signed(_node: Any, values: Any, *_bits: Any) -> bool:
    return not is_signless(values)


def _is_without_weights(_node: Any, values: Any, _groups: Any, weight: Any, bias: Any, *_rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    return not values.requires_grad() or any(map(symbolic_helper._is_none, (weight, bias)))


def _is_transposed(_node: Any, *arguments: Any) -> bool:
    from torch.onnx import symbolic_helper

    return bool(symbolic_helper._get_const(arguments[6], "b", "transposed"))


def _has_groups(_node: Any, _values: Any, weight: Any, *rest: Any) -> bool:
    from torch.onnx import symbolic_helper

    # `_convolution_mode` has it after bias, stride, padding and dilation, `_convolution` two arguments later.
    groups = rest[4] if len(rest) == 5 else rest[6]
    return symbolic_helper._get_const(groups, "i", "groups") > 1 and _rank(weight) != 4


def _rank(value: Any) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._get_tensor_rank(value)


def _unpacked(tensors: Any) -> list[Any]:
    from torch.onnx import symbolic_helper

    return list(symbolic_helper._unpack_list(tensors)) if symbolic_helper._is_packed_list(tensors) else []


_SMALL = frozenset(("Byte", "Char", "Short"))
"""The exporter's names of the integers of 8 and 16 bits."""


ROWS = (
    # Functions of each element.
    Row(
        "tan asin acos atan sinh cosh asinh acosh atanh expm1 erfc erfinv lgamma digamma sinc i0 trunc frac "
        "hardswish hardsigmoid mish selu elu celu softplus threshold prelu",
        _always,
        "they have no gradient on the CPU, or no export",
    ),
    Row("sign floor ceil round", _trains, "the gradient of zero is missing"),
    Row("floor ceil", _of_integers, "they take no integers"),
    Row("round", _has_decimals, "the exporter knows no decimals"),
    Row(
        "glu log1p log_sigmoid binary_cross_entropy_with_logits",
        _always,
        "as a product with a sigmoid, or a sum with one, they lose all digits where they are nearly zero",
    ),
    Row(
        "exp exp2 log log2 log10 sqrt rsqrt reciprocal tanh atan2 square sin cos relu softmax log_softmax",
        _of_integers_alone,
        "the exporter casts no integers",
    ),
    Row(
        "sin cos relu softmax log_softmax matmul bmm mm baddbmm leaky_relu",
        _of_doubles,
        "they or their gradients have no kernel for fp64 on the CPU",
    ),
    Row("erf", _is_not_single, "it has a kernel for fp32 alone"),
    Row("leaky_relu", _falls, "with a negative slope the gradient goes by the sign of the result"),
    Row("atan2 tensordot outer det linalg_det logdet", _trains, "their gradient is missing or wrong"),
    Row(
        "pow",
        _has_learnt_exponent,
        "the gradient of the exponent is omitted, in silence if it has another way to the output; that of "
        "`a ** 0` is NaN where a is zero",
    ),
    Row("pow", _is_whole_power, "where PyTorch's wraps, ONNX Runtime's is the least integer"),
    Row(
        "clamp clamp_min clamp_max",
        _has_other_limits,
        "a limit of one element gets no gradient, and at a limit the gradient is the limit's too; of integers the "
        "exporter cuts the fractions off the limits",
    ),
    Row("remainder fmod", _to_floats, "the exporter goes by way of a rounded quotient without a gradient"),
    Row("bitwise_right_shift __rshift_", _is_signed, "the exporter rounds negative integers towards zero"),
    Row(
        "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine",
        _always,
        "the zero point has to be an initializer, and there is no gradient",
    ),
    # Integers and truths.
    Row(
        "sub rsub mul remainder fmod diff bitwise_left_shift __lshift_ eq ne lt le gt ge cumsum cumprod neg tril "
        "triu add max min maximum minimum sort argsort",
        _of_small_integers,
        "there is no kernel for most integers of 8 or 16 bits, and a number beside them is not wrapped",
    ),
    Row("add max min maximum minimum", _of_truths, "there is no kernel for booleans"),
    Row("sort argsort", _of_one_truth, "there is no kernel for booleans"),
    Row("max min maximum minimum", _of_two_halves, "their gradients in fp16 are not finite"),
    Row("masked_fill", _fills, "there is no kernel for booleans and small integers"),
    Row("where", _chooses, "there is no kernel for booleans and small integers"),
    Row("argmin", _of_integers, "there is no kernel for integers"),
    # Over dimensions.
    Row(
        "amax amin aminmax logsumexp norm linalg_vector_norm prod cumprod logcumsumexp",
        _always,
        "they have no gradient on the CPU, or no export",
    ),
    Row("cumsum", _to_floats, "it has no gradient"),
    Row("std std_mean", _always, "where all values are the same, the gradient of the root is NaN instead of zero"),
    Row(
        "linalg_norm linalg_matrix_norm frobenius_norm",
        _always,
        "where all values are zero, the gradient is NaN instead of zero",
    ),
    Row("sum mean", _of_no_dimensions, "ORTModule's inference of shapes fails at a dimension of a number"),
    Row("sum", _is_over_no_list, "ORTModule's inference of shapes fails at an empty list, which means all"),
    Row(
        "cosine_similarity",
        _always,
        "of a vector of zeros the gradient is NaN, and the epsilon bounds the product of both norms",
    ),
    Row("cdist", _always, "the shapes are wrong for p=1, and both tensors cannot be the same"),
    Row(
        "pairwise_distance",
        _always,
        "the exporter takes powers of negative numbers, and adds the epsilon to the exponent",
    ),
    Row("einsum", _contracts, "the exporter fails at operands that are broadcast, at a number, and in fp64"),
    Row("nll_loss nll_loss2d nll_loss_nd", _trains, "the gradient is missing or wrong"),
    Row("topk", _has_known_count, "of equal values it takes others, so that gradients reach other elements"),
    Row("sort argsort", _has_stable, "the exporter takes `stable` for the dimension"),
    Row("_unique2", _always, "the indices of the values have lost their dimensions"),
    # Parts and places.
    Row("cat stack hstack vstack", _joins_doubles, "their gradients have no kernel for fp64 on the CPU"),
    Row("roll", _turns_over, "by more than a size, the exporter leaves elements where they are"),
    Row("flip", _of_floats, "the gradient fails where the size of a flipped dimension is known"),
    Row("repeat_interleave", _has_counts, "of a tensor of counts the exporter makes a sequence"),
    Row("pad", _cuts_off, "the exporter repeats other elements for a width below zero"),
    Row("pad", _repeats_edges, "it has no gradient for these modes"),
    Row(
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
        _always,
        "they have no gradient",
    ),
    Row("_pack_padded_sequence _pad_packed_sequence", _always, "ONNX has no operator for them"),
    Row("scatter_add", _always, "the tensor that is added to gets a gradient of zero at these places"),
    Row("index_add", _always, "of several values for one place one is added"),
    Row("scatter_reduce", _always, "building the gradient ends the process; some reductions have no export"),
    Row("index_copy index_fill", _always, "the exporter fails"),
    # Images, series and volumes.
    Row("_convolution", _is_transposed, "the gradient is missing or fails on the CPU"),
    Row(
        "_convolution _convolution_mode",
        _has_groups,
        "on the CPU, values that the gradients of other layers need become zeros (seen in Mamba and wav2vec 2.0)",
    ),
    Row(
        "_convolution _convolution_mode",
        lambda _node, _x, weight, *_rest: _of_doubles(_node, weight),
        "it has no kernel for fp64 on the CPU",
    ),
    Row(
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool3d",
        _always,
        "they have no gradient on the CPU, or no export for several elements",
    ),
    Row(
        "max_pool1d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
        _trains,
        "the gradient writes out of bounds where a size varies",
    ),
    Row(
        "max_pool2d max_pool2d_with_indices avg_pool2d",
        _of_one_image,
        "ONNX takes one image without a batch for a series",
    ),
    Row(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        _always,
        "gradients are wrong if the scale does not divide the size, or there are none on the CPU",
    ),
    Row("pixel_shuffle", _always, "the gradient fails on the CPU"),
    Row("group_norm", _is_without_weights, "ORTModule's node needs weights, and a gradient of its first input"),
    Row("grid_sampler", _of_floats, "it has no gradient"),
    Row("affine_grid_generator max_unpool2d max_unpool3d", _always, "sizes that vary are not exported"),
)
