"""ONNX symbolics for ATen operators that torch's TorchScript exporter lacks or exports wrongly at ORTModule's opset.

transformers' causal models use ``diff`` without an attention mask, to look for packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ortlaunch.ort.kernels.traced import integers
from ortlaunch.ort.mends import (
    arithmetic,
    as_calls,
    broadcasting,
    choices,
    division,
    exporters,
    losses,
    noise,
    recurrent,
    saturation,
    scatter,
    spatial,
    stacks,
    torch_calls,
    truths,
    unflattening,
    vectors,
    views,
)
from ortlaunch.ort.mends.attention import scaled_dot_product_attention
from ortlaunch.ort.mends.values import cast, number

_OPSET = 17
_NO_REDUCTION, _MEAN = 0, 1
"""How a loss is reduced, by ATen's numbers; 2 is a sum."""
_FLOAT = 6
"""The number of fp32 among ATen's dtypes."""


def register() -> None:
    """Registers the symbolics for training; call it after the constructor of an ORTModule, which registers its own."""
    register_standard()
    for subject in (arithmetic, division, losses, noise, recurrent, saturation, scatter, spatial, views):
        _register(subject.SYMBOLICS)
    torch_calls.register()
    arithmetic.register_range()
    as_calls.register()
    broadcasting.register()


def register_standard() -> None:
    """Registers those symbolics that write standard ONNX operators, which any runtime has."""
    for standard in (_STANDARD, *(subject.SYMBOLICS for subject in (choices, stacks, truths, unflattening, vectors))):
        _register(standard)


def _register(symbolics: Mapping[str, Callable[..., Any]]) -> None:
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    for name, symbolic in symbolics.items():
        register_custom_op_symbolic(name, symbolic, _OPSET)


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
    made = exporters.symbolic("aten::eye")(g, *sizes, of_floats, layout, device, pinned)
    return cast(g, made, g.original_node.output())


def _full(g: Any, *arguments: Any) -> Any:
    """Exports ``torch.full`` in the dtype of its number; the exporter takes fp32 if none is named."""
    return cast(g, exporters.symbolic("aten::full")(g, *arguments), g.original_node.output())


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
        return exporters.symbolic("aten::roll")(g, values, shifts, dims)
    flat = g.op("Reshape", values, g.op("Constant", value_t=torch.tensor([-1])))
    rolled = exporters.symbolic("aten::roll")(g, flat, shifts, g.op("Constant", value_t=torch.tensor([0])))
    return g.op("Reshape", rolled, g.op("Shape", values)).setType(values.type())


def _tile(g: Any, values: Any, counts: Any) -> Any:
    """Exports ``torch.tile`` as ``repeat``; ORTModule's inference of shapes does not follow the exporter's graph."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._get_const(counts, "is", "dims")
    rank = symbolic_helper._get_tensor_rank(values) or 0
    padded = [*[1] * (rank - len(known)), *known]
    return exporters.symbolic("aten::repeat")(g, values, g.op("Constant", value_t=torch.tensor(padded)))


def _narrow(g: Any, values: Any, dim: Any, start: Any, length: Any) -> Any:
    """Exports ``torch.narrow``; up to the end, a first index below zero gives the exporter an end of zero."""
    from torch.onnx import symbolic_helper

    first, count = (symbolic_helper._maybe_get_const(one, "i") for one in (start, length))
    if isinstance(first, int) and isinstance(count, int) and first < 0 and first + count == 0:
        axis = symbolic_helper._get_const(dim, "i", "dim")
        return symbolic_helper._slice_helper(g, values, axes=[axis], starts=[first], ends=[2**63 - 1])
    return exporters.symbolic("aten::narrow", 9)(g, values, dim, start, length)


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
    return exporters.symbolic("aten::repeat_interleave")(g, values, repeats, dim, output_size)


_STANDARD = {
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
    "aten::cumsum": arithmetic.cumsum,
}
