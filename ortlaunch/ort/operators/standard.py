"""Symbolics that write standard ONNX operators, which any runtime has.

They are for operators that torch's TorchScript exporter lacks or exports wrongly at ORTModule's opset, and for those
whose export onnxruntime 1.19.2 differentiates wrongly:

- ``where`` and ``masked_fill``: the gradient of Where is wrong for a choice with fewer elements than the result. So a
  choice gets the result's shape first, and the gradient of Expand sums.
- ``hstack`` and ``vstack``: operators of ONNX's sequences have no gradient.
- ``unflatten``: the exporter computes the place of the new dimensions in the graph. ORTModule's inference of shapes
  then does not know the rank, and stops with an assertion.
- Products with a vector: the gradient of MatMul is wrong or fails for operands of rank 1, so that vectors become
  matrices with one row or column.
- ``any`` and ``all``: the exporter casts what ``any`` is asked about to int64 and adds it up, so that 0.3 counts as
  zero and -1 and 1 cancel each other; ``all`` takes booleans alone.
- ``diff``: transformers' causal models use it without an attention mask, to look for packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ortlaunch.ort.operators import exporter
from ortlaunch.ort.operators.attention import scaled_dot_product_attention
from ortlaunch.ort.operators.traced import integers
from ortlaunch.ort.operators.values import cast, is_floating, number, sizes

_NO_REDUCTION, _MEAN = 0, 1
"""How a loss is reduced, by ATen's numbers; 2 is a sum."""
_FLOAT = 6
"""The number of fp32 among ATen's dtypes."""


def _diff(g: Any, values: Any, n: Any, dim: Any, prepend: Any, append: Any) -> Any:
    """Exports ``torch.diff``: `n`-th differences along `dim` of `values` with `prepend` and `append` joined on."""
    from torch.onnx import symbolic_helper

    count = symbolic_helper._get_const(n, "i", "n")
    axis = symbolic_helper._get_const(dim, "i", "dim")
    parts = [part for part in (prepend, values, append) if not symbolic_helper._is_none(part)]
    joined = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else values
    is_bool = joined.type().scalarType() == "Bool"
    for _ in range(count):
        later = symbolic_helper._slice_helper(g, joined, axes=[axis], starts=[1], ends=[2**63 - 1])
        earlier = symbolic_helper._slice_helper(g, joined, axes=[axis], starts=[0], ends=[-1])
        # The difference of booleans means "differs", and ONNX's Sub does not take booleans.
        joined = g.op("Xor", later, earlier) if is_bool else g.op("Sub", later, earlier)
    return joined


def _layer_norm(g: Any, values: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any, cudnn_enable: Any) -> Any:
    """Exports ``torch.nn.functional.layer_norm``; the gradient needs a weight and a bias even if the model has none."""
    from torch.onnx import _type_utils, symbolic_helper

    shape = symbolic_helper._get_const(normalized_shape, "is", "normalized_shape")
    dtype = _type_utils.JitScalarType.from_value(values).dtype()
    if symbolic_helper._is_none(weight):
        weight = g.op("Constant", value_t=torch.ones(shape, dtype=dtype))
    if symbolic_helper._is_none(bias):
        bias = g.op("Constant", value_t=torch.zeros(shape, dtype=dtype))
    epsilon = symbolic_helper._get_const(eps, "f", "eps")
    # The gradient needs the other two outputs.
    normalized, _, _ = g.op(
        "LayerNormalization", values, weight, bias, epsilon_f=epsilon, axis_i=-len(shape), outputs=3
    )
    return normalized


def rms_norm(g: Any, values: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    """Exports ``torch.nn.functional.rms_norm``; half precision is computed in fp32, as torch does."""
    from torch.onnx import TensorProtoDataType, _type_utils, symbolic_helper

    scalar_type = _type_utils.JitScalarType.from_value(values)
    dtype = scalar_type.dtype()
    small = torch.finfo(dtype).eps if symbolic_helper._is_none(eps) else symbolic_helper._get_const(eps, "f", "eps")
    shape = symbolic_helper._get_const(normalized_shape, "is", "normalized_shape")
    is_half = dtype in (torch.float16, torch.bfloat16)
    work = g.op("Cast", values, to_i=TensorProtoDataType.FLOAT) if is_half else values
    work_dtype = torch.float32 if is_half else dtype
    # ONNX Runtime fuses exactly this sequence into a single kernel.
    squares = g.op("Pow", work, g.op("Constant", value_t=torch.tensor(2.0, dtype=work_dtype)))
    mean = g.op("ReduceMean", squares, axes_i=list(range(-len(shape), 0)), keepdims_i=1)
    root = g.op("Sqrt", g.op("Add", mean, g.op("Constant", value_t=torch.tensor(small, dtype=work_dtype))))
    normalized = g.op("Div", work, root)
    if is_half:
        normalized = g.op("Cast", normalized, to_i=scalar_type.onnx_type())
    return normalized if symbolic_helper._is_none(weight) else g.op("Mul", normalized, weight)


def _log_sigmoid(g: Any, values: Any) -> Any:
    """Exports ``logsigmoid``; the exporter's own ``Log(Sigmoid(x))`` is inexact from x = 14 on, infinite for x < -88.

    ``log(sigmoid(x))`` is the first element of ``log_softmax([x, 0])``, whose kernel and gradient are exact everywhere.
    """
    from torch.onnx import symbolic_helper

    pair = [symbolic_helper._unsqueeze_helper(g, one, [-1]) for one in (values, _zeros_like(g, values))]
    both = g.op("LogSoftmax", g.op("Concat", *pair, axis_i=-1), axis_i=-1)
    first = symbolic_helper._slice_helper(g, both, axes=[-1], starts=[0], ends=[1])
    result = symbolic_helper._squeeze_helper(g, first, [-1])
    result.setType(values.type())
    return result


def _binary_cross_entropy_with_logits(
    g: Any, logits: Any, target: Any, weight: Any, pos_weight: Any, reduction: Any
) -> Any:
    """Exports ``binary_cross_entropy_with_logits`` by way of `_log_sigmoid`; torch's formula, term by term."""
    from torch.onnx import symbolic_helper

    one = number(g, 1.0, logits)
    log_sigmoid = _log_sigmoid(g, logits)
    if not symbolic_helper._is_none(pos_weight):
        factor = g.op("Add", one, g.op("Mul", g.op("Sub", pos_weight, one), target))
        log_sigmoid = g.op("Mul", factor, log_sigmoid)
    loss = g.op("Sub", g.op("Mul", g.op("Sub", one, target), logits), log_sigmoid)
    if not symbolic_helper._is_none(weight):
        loss = g.op("Mul", loss, weight)
    how = symbolic_helper._get_const(reduction, "i", "reduction")
    if how == _NO_REDUCTION:
        return loss
    return g.op("ReduceMean" if how == _MEAN else "ReduceSum", loss, keepdims_i=0)


def _relu6(g: Any, values: Any) -> Any:
    """Exports ``relu6``, which is ``hardtanh`` from 0 to 6."""
    return _clipped(g, values, 0.0, 6.0)


def _hardtanh(g: Any, values: Any, least: Any, most: Any) -> Any:
    """Exports ``hardtanh``."""
    from torch.onnx import symbolic_helper

    least, most = (symbolic_helper._get_const(one, "f", "limit") for one in (least, most))
    return _clipped(g, values, least, most)


def _clipped(g: Any, values: Any, least: float, most: float) -> Any:
    """Clips values with no gradient at the limits, as ``hardtanh`` has it; the gradient of ONNX's Clip passes there."""
    low, high = number(g, least, values), number(g, most, values)
    is_low, is_high = g.op("LessOrEqual", values, low), g.op("GreaterOrEqual", values, high)
    result = g.op("Where", is_low, low, g.op("Where", is_high, high, values))
    result.setType(values.type())
    return result


def _zeros_like(g: Any, values: Any) -> Any:
    return g.op("Expand", number(g, 0.0, values), g.op("Shape", values))


def _count_nonzero(g: Any, values: Any, dim: Any = None) -> Any:
    """Exports ``torch.count_nonzero``, which the exporter lacks; models decide by it whether a mask hides anything."""
    from torch.onnx import TensorProtoDataType, symbolic_helper

    is_whole = dim is None or symbolic_helper._is_none(dim)
    # A single dimension is a number, several are a list.
    axes = None if is_whole else (integers(dim) or symbolic_helper._parse_arg(dim, "is"))
    is_nonzero = g.op("Cast", g.op("Cast", values, to_i=TensorProtoDataType.BOOL), to_i=TensorProtoDataType.INT64)
    inputs = [] if axes is None else [g.op("Constant", value_t=torch.tensor(axes))]
    return g.op("ReduceSum", is_nonzero, *inputs, keepdims_i=0)


def _linspace(g: Any, start: Any, end: Any, steps: Any, *_options: Any) -> Any:
    """Exports ``torch.linspace``.

    The exporter's own graph mixes dtypes where the number of steps is a size of the input; building the gradient of
    such a graph ends the process.
    """
    from torch.onnx import TensorProtoDataType

    zero, one = (g.op("Constant", value_t=torch.tensor(value)) for value in (0, 1))
    steps = g.op("Cast", steps, to_i=TensorProtoDataType.INT64)
    first, last, places, intervals = (
        g.op("Cast", value, to_i=TensorProtoDataType.DOUBLE)
        for value in (start, end, g.op("Range", zero, steps, one), g.op("Max", g.op("Sub", steps, one), one))
    )
    step = g.op("Div", g.op("Sub", last, first), intervals)
    return cast(g, g.op("Add", first, g.op("Mul", places, step)), g.original_node.output())


def _eye(g: Any, *arguments: Any) -> Any:
    """Exports ``torch.eye`` of numbers, because onnxruntime has none of booleans."""
    *sizes, _dtype, layout, device, pinned = arguments
    of_floats = g.op("Constant", value_t=torch.tensor(_FLOAT))
    made = exporter.symbolic("aten::eye")(g, *sizes, of_floats, layout, device, pinned)
    return cast(g, made, g.original_node.output())


def _full(g: Any, *arguments: Any) -> Any:
    """Exports ``torch.full`` in the dtype of its number; the exporter takes fp32 if none is named."""
    return cast(g, exporter.symbolic("aten::full")(g, *arguments), g.original_node.output())


def _squeeze(g: Any, values: Any, dim: Any = None) -> Any:
    """Exports ``squeeze``; dimensions of another size than 1 stay, as in PyTorch. ONNX's operator fails at them."""
    from torch.onnx import symbolic_helper

    if dim is None:
        return g.op("Squeeze", values)
    is_list = dim.node().kind() == "prim::ListConstruct"
    given = symbolic_helper._get_const(dim, "is", "dim") if is_list else integers(dim) or []
    traced = g.original_node.inputsAt(0).type().sizes()
    axes = given if traced is None else [axis for axis in given if traced and traced[axis] == 1]
    return symbolic_helper._squeeze_helper(g, values, axes) if axes else values


def _roll(g: Any, values: Any, shifts: Any, dims: Any) -> Any:
    """Exports ``torch.roll``; without dimensions, which the exporter lacks, the flattened tensor is rolled."""
    from torch.onnx import symbolic_helper

    if symbolic_helper._get_const(dims, "is", "dims"):
        return exporter.symbolic("aten::roll")(g, values, shifts, dims)
    flat = g.op("Reshape", values, g.op("Constant", value_t=torch.tensor([-1])))
    rolled = exporter.symbolic("aten::roll")(g, flat, shifts, g.op("Constant", value_t=torch.tensor([0])))
    return g.op("Reshape", rolled, g.op("Shape", values)).setType(values.type())


def _tile(g: Any, values: Any, counts: Any) -> Any:
    """Exports ``torch.tile`` as ``repeat``; ORTModule's inference of shapes does not follow the exporter's graph."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._get_const(counts, "is", "dims")
    rank = symbolic_helper._get_tensor_rank(values) or 0
    padded = [*[1] * (rank - len(known)), *known]
    return exporter.symbolic("aten::repeat")(g, values, g.op("Constant", value_t=torch.tensor(padded)))


def _narrow(g: Any, values: Any, dim: Any, start: Any, length: Any) -> Any:
    """Exports ``torch.narrow``; up to the end, a first index below zero gives the exporter an end of zero."""
    from torch.onnx import symbolic_helper

    first, count = (symbolic_helper._maybe_get_const(one, "i") for one in (start, length))
    if isinstance(first, int) and isinstance(count, int) and first < 0 and first + count == 0:
        axis = symbolic_helper._get_const(dim, "i", "dim")
        return symbolic_helper._slice_helper(g, values, axes=[axis], starts=[first], ends=[2**63 - 1])
    return exporter.symbolic("aten::narrow", 9)(g, values, dim, start, length)


def _repeat_interleave(g: Any, values: Any, repeats: Any, dim: Any = None, output_size: Any = None) -> Any:
    """Exports ``repeat_interleave`` with a dimension of its own.

    torch's exporter (seen in 2.13.0) adds the rank to a negative dimension in place. Every other ``-1`` of the graph
    is the same constant, so ``stack`` and ``flatten`` of other layers would get another dimension.
    """
    from torch.onnx import symbolic_helper

    if dim is not None and not symbolic_helper._is_none(dim):
        axis = symbolic_helper._get_const(dim, "i", "dim")
        rank = symbolic_helper._get_tensor_rank(values) or 0
        dim = g.op("Constant", value_t=torch.tensor(axis + rank if axis < 0 else axis))
    return exporter.symbolic("aten::repeat_interleave")(g, values, repeats, dim, output_size)


def _cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """Exports ``cumsum``; integers and booleans are added up as int64 like torch does, if no dtype is named."""
    from torch.onnx import _type_utils, symbolic_helper

    if dtype is not None and not symbolic_helper._is_none(dtype):
        kind = _type_utils.JitScalarType(symbolic_helper._get_const(dtype, "i", "dtype"))
        x = g.op("Cast", x, to_i=kind.onnx_type()).setType(x.type().with_dtype(kind.dtype()))
    elif not is_floating(x):
        kind = _type_utils.JitScalarType.INT64
        x = g.op("Cast", x, to_i=kind.onnx_type()).setType(x.type().with_dtype(kind.dtype()))
    axis = symbolic_helper._get_const(dim, "i", "dim")
    return g.op("CumSum", x, g.op("Constant", value_t=torch.tensor(axis)))


def _truth(of_all: bool, g: Any, values: Any, dims: Any = None, keep: Any = None) -> Any:
    """Exports ``any`` as a count of what is not zero, and ``all`` as no one that is."""
    from torch.onnx import TensorProtoDataType, symbolic_helper

    truths = values
    if values.type().scalarType() != "Bool":
        truths = g.op("Cast", values, to_i=TensorProtoDataType.BOOL)
    counted = g.op("Not", truths) if of_all else truths
    has_dims = dims is not None and not symbolic_helper._is_none(dims)
    # A single dimension is a number, several are a list.
    axes = (integers(dims) or symbolic_helper._parse_arg(dims, "is")) if has_dims else None
    if axes == []:
        result = truths
    else:
        is_number = symbolic_helper._get_tensor_rank(values) == 0
        inputs = [] if axes is None or is_number else [g.op("Constant", value_t=torch.tensor(axes))]
        kept = keep is not None and bool(symbolic_helper._get_const(keep, "b", "keepdim"))
        count = g.op("ReduceSum", g.op("Cast", counted, to_i=TensorProtoDataType.INT64), *inputs, keepdims_i=int(kept))
        found = g.op("Greater", count, g.op("Constant", value_t=torch.tensor(0)))
        result = g.op("Not", found) if of_all else found
    output = g.original_node.output()
    return result if output.type().scalarType() in ("Bool", None) else cast(g, result, output)


def where(g: Any, condition: Any, chosen: Any = None, other: Any = None, _outputs: int | None = None) -> Any:
    """Exports ``torch.where`` in both of its forms."""
    if chosen is None or other is None:
        return exporter.symbolic("aten::where", 9)(g, condition, chosen, other, _outputs)
    whole = _like(g, chosen, condition, other), _like(g, other, condition, chosen)
    kinds = [value.type().scalarType() for value in whole]
    if "Bool" in kinds and kinds[0] != kinds[1]:
        # The exporter gives no boolean the dtype of a number.
        output = g.original_node.output()
        whole = cast(g, whole[0], output), cast(g, whole[1], output)
    return exporter.symbolic("aten::where", 9)(g, condition, *whole)


def _masked_fill(g: Any, values: Any, mask: Any, value: Any) -> Any:
    """Exports ``masked_fill``; `value` may be a tensor without dimensions."""
    if value.node().kind() in ("onnx::Constant", "prim::Constant"):
        return exporter.symbolic("aten::masked_fill")(g, values, mask, value)
    return where(g, mask, cast(g, value, values).setType(values.type().with_sizes([])), values)


def _like(g: Any, choice: Any, *others: Any) -> Any:
    """Returns a choice with the shape of the result, if a gradient could need it."""
    if choice.node().kind() == "onnx::Constant" or not _is_smaller(choice, others):
        return choice
    whole = choice
    for other in others:
        # Expand makes the shape of both of its operands.
        whole = g.op("Expand", whole, g.op("Shape", other))
    return whole.setType(choice.type().with_sizes([None] * max(_rank(value) for value in (choice, *others))))


def _is_smaller(choice: Any, others: tuple[Any, ...]) -> bool:
    if not is_floating(choice) or any(_rank(value) is None for value in (choice, *others)):
        return False
    return any(_rank(choice) < _rank(other) for other in others) or 1 in sizes(choice)


def _rank(value: Any) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._get_tensor_rank(value)


def _hstack(g: Any, tensors: Any) -> Any:
    """Exports ``torch.hstack``: vectors are joined end to end, other tensors along the second dimension."""
    return _joined(g, tensors, least_rank=1, axis_of=lambda rank: 0 if rank == 1 else 1)


def _vstack(g: Any, tensors: Any) -> Any:
    """Exports ``torch.vstack``: vectors are rows, other tensors are joined along the first dimension."""
    return _joined(g, tensors, least_rank=2, axis_of=lambda _rank: 0)


def _joined(g: Any, tensors: Any, *, least_rank: int, axis_of: Any) -> Any:
    from torch.onnx import errors, symbolic_helper

    parts = symbolic_helper._unpack_list(tensors)
    ranks = [symbolic_helper._get_tensor_rank(part) for part in parts]
    if any(rank is None for rank in ranks):
        raise errors.SymbolicValueError(
            "a stack of tensors of an unknown number of dimensions is not exported", tensors
        )
    joined = []
    for part, rank in zip(parts, ranks, strict=True):
        # Missing dimensions come first.
        missing = max(0, least_rank - rank)
        joined.append(symbolic_helper._unsqueeze_helper(g, part, list(range(missing))) if missing else part)
    return g.op("Concat", *joined, axis_i=axis_of(max(least_rank, max(ranks))))


_END = 2**63 - 1


def _unflatten(g: Any, values: Any, dim: Any, sizes: Any) -> Any:
    """Exports ``values.unflatten(dim, sizes)``; one of the sizes may be -1."""
    from torch.onnx import symbolic_helper

    rank = symbolic_helper._get_tensor_rank(values)
    if rank is None:
        return symbolic_helper._unimplemented("unflatten", "the rank must be known at export time", values)
    axis = symbolic_helper._get_const(dim, "i", "dim") % rank
    shape = g.op("Shape", values)
    before = [_part(g, shape, 0, axis)] if axis else []
    after = [_part(g, shape, axis + 1, _END)] if axis < rank - 1 else []
    return g.op("Reshape", values, g.op("Concat", *before, *_new(g, sizes), *after, axis_i=0))


def _part(g: Any, shape: Any, start: int, end: int) -> Any:
    ends = [g.op("Constant", value_t=torch.tensor([place])) for place in (start, end)]
    return g.op("Slice", shape, *ends)


def _new(g: Any, sizes: Any) -> list[Any]:
    """Returns the new sizes as int64 tensors of rank 1."""
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_packed_list(sizes):
        return [symbolic_helper._unsqueeze_helper(g, size, [0]) for size in symbolic_helper._unpack_list(sizes)]
    numbers = symbolic_helper._get_const(sizes, "is", "sizes")
    return [g.op("Constant", value_t=torch.tensor(list(numbers)))]


def matmul(g: Any, left: Any, right: Any) -> Any:
    """Exports ``left @ right``, where either may be a vector."""
    from torch.onnx import symbolic_helper

    has_row, has_column = (symbolic_helper._get_tensor_rank(x) == 1 for x in (left, right))
    if has_row:
        left = symbolic_helper._unsqueeze_helper(g, left, [0])
    if has_column:
        right = symbolic_helper._unsqueeze_helper(g, right, [1])
    product = g.op("MatMul", left, right)
    axes = [-2] * has_row + [-1] * has_column
    # The exporter's helper for it refuses results of unknown rank.
    return g.op("Squeeze", product, g.op("Constant", value_t=torch.tensor(axes))) if axes else product


def linear(g: Any, values: Any, weight: Any, bias: Any = None) -> Any:
    """Exports ``torch.nn.functional.linear``; the weight or the values may be a vector."""
    from torch.onnx import symbolic_helper

    ranks = [symbolic_helper._get_tensor_rank(x) for x in (values, weight)]
    if 1 not in ranks:
        return exporter.symbolic("aten::linear")(g, values, weight, bias)
    turned = weight if ranks[1] == 1 else g.op("Transpose", weight, perm_i=[1, 0])
    product = matmul(g, values, turned)
    has_bias = bias is not None and not symbolic_helper._is_none(bias)
    return g.op("Add", product, bias) if has_bias else product


def _addmv(g: Any, values: Any, matrix: Any, vector: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``beta * values + alpha * (matrix @ vector)``."""
    return _sum(g, values, matmul(g, matrix, vector), beta, alpha)


def _addbmm(g: Any, values: Any, left: Any, right: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``beta * values + alpha * (left @ right).sum(0)``."""
    axis = g.op("Constant", value_t=torch.tensor([0]))
    return _sum(g, values, g.op("ReduceSum", g.op("MatMul", left, right), axis, keepdims_i=0), beta, alpha)


def _addr(g: Any, values: Any, left: Any, right: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``beta * values + alpha * outer(left, right)``."""
    from torch.onnx import symbolic_helper

    column = symbolic_helper._unsqueeze_helper(g, left, [1])
    row = symbolic_helper._unsqueeze_helper(g, right, [0])
    return _sum(g, values, g.op("Mul", column, row), beta, alpha)


def _sum(g: Any, values: Any, product: Any, beta: Any, alpha: Any) -> Any:
    from torch.onnx import symbolic_helper

    scaled = _scaled(g, product, alpha, like=values)
    if symbolic_helper._maybe_get_const(beta, "f") == 0.0:
        # torch ignores the values then, even if they are not finite, but the result has their dtype.
        return scaled
    return g.op("Add", _scaled(g, values, beta, like=values), scaled)


def _scaled(g: Any, values: Any, factor: Any, like: Any) -> Any:
    from torch.onnx import _type_utils, symbolic_helper

    scalar_type = _type_utils.JitScalarType.from_value(like)
    number = symbolic_helper._maybe_get_const(factor, "f")
    if not isinstance(number, int | float):
        return g.op("Mul", values, g.op("Cast", factor, to_i=scalar_type.onnx_type()))
    if number == 1:
        return values
    return g.op("Mul", values, g.op("Constant", value_t=torch.tensor(float(number), dtype=scalar_type.dtype())))


SYMBOLICS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": partial(_truth, name == "all") for name in ("any", "all")},
    "aten::diff": _diff,
    "aten::layer_norm": _layer_norm,
    "aten::rms_norm": rms_norm,
    "aten::log_sigmoid": _log_sigmoid,
    "aten::binary_cross_entropy_with_logits": _binary_cross_entropy_with_logits,
    "aten::relu6": _relu6,
    "aten::hardtanh": _hardtanh,
    "aten::count_nonzero": _count_nonzero,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::linspace": _linspace,
    "aten::eye": _eye,
    "aten::full": _full,
    "aten::squeeze": _squeeze,
    "aten::roll": _roll,
    "aten::tile": _tile,
    "aten::narrow": _narrow,
    "aten::scaled_dot_product_attention": scaled_dot_product_attention,
    "aten::cumsum": _cumsum,
    "aten::where": where,
    "aten::masked_fill": _masked_fill,
    "aten::hstack": _hstack,
    "aten::vstack": _vstack,
    "aten::unflatten": _unflatten,
    **{f"aten::{name}": matmul for name in ("matmul", "mv", "dot", "vdot")},
    "aten::linear": linear,
    "aten::addmv": _addmv,
    "aten::addbmm": _addbmm,
    "aten::addr": _addr,
}
