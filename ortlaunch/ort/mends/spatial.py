"""Operators on images, series and volumes; PyTorch computes them and their gradients.

onnxruntime 1.19.2 and torch's exporter have these faults:

- ``interpolate``: nearest and bicubic get a wrong gradient if the scale does not divide the size, the linear modes have
  no gradient on the CPU, and the other modes are not exported.
- Transposed convolution, ``pixel_shuffle``, ``instance_norm``, ``group_norm`` without weights or of values without
  gradient, and average pooling in one or three dimensions have no gradient on the CPU or a failing one.
- With the gradient of a convolution with groups in one or three dimensions, values that other layers' gradients need
  become zeros on the CPU, in silence (seen in Mamba and wav2vec 2.0; the cause was not looked for in its source).
- ``affine_grid`` and ``max_unpool2d`` are not exported for sizes that vary, or not at all.
- Adaptive pooling is exported for one output element only, except for averages in two dimensions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.ort.kernels import shapes
from ortlaunch.ort.mends import exporters
from ortlaunch.ort.mends.torch_nodes import exact, numbers, torch_node
from ortlaunch.ort.mends.values import integers, number, sizes

_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")


def _channels_kept(x: list[Any], *_: Any) -> list[Any]:
    return [*x[:2], *[None] * (len(x) - 2)]


def _resized(x: list[Any], size: Any, *_: Any) -> list[Any]:
    """Returns the shape of a result whose sizes, of the last dimensions, are given as an argument."""
    if not isinstance(size, shapes.Values):
        return _channels_kept(x)
    return [*x[: len(x) - len(size)], *size]


def _last_unknown(x: list[Any], *_: Any) -> list[Any]:
    return [None] * len(x)


@torch_node(
    "Tensor x, int[]? size, int[]? scales, int mode, bool align_corners, bool antialias",
    differentiable=(0,),
    shape=_resized,
)
def _interpolate(
    x: Tensor, size: list[int] | None, scales: list[int] | None, mode: int, align_corners: bool, antialias: bool
) -> Tensor:
    name = _MODES[mode]
    return functional.interpolate(
        x,
        size,
        numbers(scales),  # type: ignore[arg-type]
        mode=name,
        align_corners=None if name.startswith("nearest") else align_corners,
        antialias=antialias,
    )


@torch_node(
    "Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int[] output_padding, "
    "int groups",
    differentiable=(0, 1, 2),
    shape=_last_unknown,
)
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
) -> Tensor:
    return torch.convolution(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _gridded(theta: list[Any], size: list[Any], *_: Any) -> list[Any]:
    rank = len(size) if isinstance(size, shapes.Values) else int(size[0])
    return [theta[0], *[None] * (rank - 2), rank - 2]


@torch_node("Tensor theta, int[] size, bool align_corners", differentiable=(0,), shape=_gridded)
def _affine_grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    return functional.affine_grid(theta, size, align_corners)


@torch_node("Tensor x, Tensor index, int[] size", differentiable=(0,), shape=_resized)
def _max_unpool(x: Tensor, index: Tensor, size: list[int]) -> Tensor:
    if len(size) == 2:
        flat: Tensor = torch.ops.aten.max_unpool2d(x, index, size)
        return flat
    # Its strides and paddings only have to be valid.
    result: Tensor = torch.ops.aten.max_unpool3d(x, index, size, [1, 1, 1], [0, 0, 0])
    return result


@torch_node("Tensor x, int factor", differentiable=(0,), shape=_last_unknown)
def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    return functional.pixel_shuffle(x, factor)


@torch_node("Tensor x, Tensor? weight, Tensor? bias, int[] eps", differentiable=(0, 1, 2))
def _instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: list[int]) -> Tensor:
    (small,) = numbers(eps) or [0.0]
    return functional.instance_norm(x, None, None, weight, bias, eps=small)


@torch_node("Tensor x, Tensor? weight, Tensor? bias, int groups, int[] eps", differentiable=(0, 1, 2))
def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: list[int]) -> Tensor:
    (small,) = numbers(eps) or [0.0]
    return functional.group_norm(x, groups, weight, bias, small)


@torch_node(
    "Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil_mode, bool count_padding, int? divisor",
    differentiable=(0,),
    shape=_last_unknown,
)
def _avg_pool(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    if len(kernel) == 1:
        return functional.avg_pool1d(x, kernel, stride, padding, ceil_mode, count_padding)
    return functional.avg_pool3d(x, kernel, stride, padding, ceil_mode, count_padding, divisor)


@torch_node("Tensor x, int[] size", differentiable=(0,), shape=_resized)
def _adaptive_avg_pool(x: Tensor, size: list[int]) -> Tensor:
    result: Tensor = getattr(functional, f"adaptive_avg_pool{len(size)}d")(x, size)
    return result


@torch_node("Tensor x, int[] size", differentiable=(0,), shape=_resized)
def _adaptive_max_pool(x: Tensor, size: list[int]) -> Tensor:
    result: Tensor = getattr(functional, f"adaptive_max_pool{len(size)}d")(x, size)
    return result


def _convolved(x: list[Any], weight: list[Any], *_: Any) -> list[Any]:
    return [*x[: 1 - len(weight)], weight[0], *[None] * (len(weight) - 2)]


_SAME = -1
"""Stands for the padding "same"."""


@torch_node(
    "Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups",
    differentiable=(0, 1, 2),
    shape=_convolved,
)
def _grouped_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    convolve = getattr(functional, f"conv{weight.dim() - 2}d")
    result: Tensor = convolve(x, weight, bias, stride, "same" if _SAME in padding else padding, dilation, groups)
    return result


def register() -> None:
    """Registers the symbolics; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    for name, symbolic in _SYMBOLICS.items():
        register_custom_op_symbolic(name, symbolic, 17)


def _interpolate_symbolic(mode: str, antialias: bool, g: Any, x: Any, size: Any, *rest: Any) -> Any:
    from torch.onnx import symbolic_helper

    align, scales = rest if len(rest) == 2 else (None, *rest)
    aligned = align is not None and bool(symbolic_helper._get_const(align, "b", "align_corners"))
    # The exporter rounds lists of numbers to fp32, which moves borders between pixels.
    factors = None if symbolic_helper._is_none(scales) else list(g.original_node.inputs())[-1].toIValue()
    return _interpolate(
        g,
        x,
        integers(g, size),
        exact(factors),
        _MODES.index(mode),
        aligned,
        antialias,
        dims=_channels_kept(sizes(x)),
    )


def _convolution_symbolic(
    g: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    output_padding: Any,
    groups: Any,
    *rest: Any,
) -> Any:
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx import symbolic_helper

    if not symbolic_helper._get_const(transposed, "b", "transposed"):
        if _needs_torch(weight, groups):
            return _grouped(g, x, weight, bias, stride, padding, dilation, groups)
        original = CustomOpSymbolicRegistry._SYMBOLICS["::_convolution"]
        return original(g, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *rest)
    lists = [integers(g, value) for value in (stride, padding, dilation, output_padding)]
    channels = symbolic_helper._get_tensor_dim_size(weight, 1)
    count = symbolic_helper._get_const(groups, "i", "groups")
    known = sizes(x)
    dims: list[int | None] = [None] * len(known)
    if len(known) == symbolic_helper._get_tensor_rank(weight):
        dims = [known[0], None if channels is None else channels * count, *dims[2:]]
    return _conv_transpose(g, x, weight, bias, *lists, count, dims=dims)


def _convolution_mode_symbolic(
    g: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Any:
    from torch.onnx import symbolic_helper

    if not _needs_torch(weight, groups):
        return exporters.symbolic("aten::_convolution_mode")(g, x, weight, bias, stride, padding, dilation, groups)
    word = symbolic_helper._get_const(padding, "s", "padding")
    width = _SAME if word == "same" else 0
    rank = symbolic_helper._get_tensor_rank(weight) or 0
    return _grouped(g, x, weight, bias, stride, _whole(g, [width] * (rank - 2)), dilation, groups)


def _needs_torch(weight: Any, groups: Any) -> bool:
    """Whether onnxruntime differentiates a convolution wrongly: with groups, if it is not in two dimensions.

    In fp64 it has none on the CPU.
    """
    from torch.onnx import symbolic_helper

    if weight.type().scalarType() == "Double":
        return True
    return symbolic_helper._get_const(groups, "i", "groups") > 1 and symbolic_helper._get_tensor_rank(weight) != 4


def _grouped(g: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any) -> Any:
    from torch.onnx import symbolic_helper

    given = None if symbolic_helper._is_none(bias) else bias
    lists = [integers(g, value) for value in (stride, padding, dilation)]
    dims = _convolved(sizes(x), sizes(weight))
    return _grouped_conv(g, x, weight, given, *lists, symbolic_helper._get_const(groups, "i", "groups"), dims=dims)


def _whole(g: Any, values: list[int]) -> Any:
    return g.op("Constant", value_t=torch.tensor(values))


def _pixel_shuffle_symbolic(g: Any, x: Any, factor: Any) -> Any:
    return _pixel_shuffle(g, x, factor, dims=_last_unknown(sizes(x)))


def _instance_norm_symbolic(
    g: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    by_batch: Any,
    momentum: Any,
    eps: Any,
    cudnn_enabled: Any,
) -> Any:
    from torch.onnx import symbolic_helper

    small = symbolic_helper._get_const(eps, "f", "eps")
    if symbolic_helper._get_const(by_batch, "b", "use_input_stats"):
        return _instance_norm(g, x, weight, bias, exact([small]))
    # In an evaluation; training has written it out.
    scale, offset = (
        g.op("Expand", number(g, neutral, mean), g.op("Shape", mean)) if symbolic_helper._is_none(given) else given
        for given, neutral in ((weight, 1.0), (bias, 0.0))
    )
    return g.op("BatchNormalization", x, scale, offset, mean, var, epsilon_f=small).setType(x.type())


def _group_norm_symbolic(g: Any, x: Any, groups: Any, weight: Any, bias: Any, eps: Any, cudnn_enabled: Any) -> Any:
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx import symbolic_helper

    # ORTModule's own node has no gradient without weights, nor where its first input needs none.
    if x.requires_grad() and not symbolic_helper._is_none(weight) and not symbolic_helper._is_none(bias):
        original = CustomOpSymbolicRegistry._SYMBOLICS["::group_norm"]
        return original(g, x, groups, weight, bias, eps, cudnn_enabled)
    return _group_norm(g, x, weight, bias, groups, exact([symbolic_helper._get_const(eps, "f", "eps")]))


def _avg_pool_symbolic(
    g: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: Any, count_padding: Any, divisor: Any = None
) -> Any:
    from torch.onnx import symbolic_helper

    given = symbolic_helper._maybe_get_const(stride, "is")
    lists = [integers(g, value) for value in (kernel, stride if given else kernel, padding)]
    return _avg_pool(g, x, *lists, ceil_mode, count_padding, divisor, dims=_last_unknown(sizes(x)))


def _adaptive_avg_pool_symbolic(g: Any, x: Any, size: Any) -> Any:
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(size, "is")
    if isinstance(known, list) and set(known) == {1} and x.type().scalarType() in ("Float", "Double"):
        # PyTorch, too, takes the mean here. A call of PyTorch takes longer than the operator, and computes twice.
        rank = len(sizes(x))
        return g.op("ReduceMean", x, axes_i=list(range(rank - len(known), rank)), keepdims_i=1)
    return _adaptive_avg_pool(g, x, integers(g, size), dims=_last_unknown(sizes(x)))


def _adaptive_max_pool_symbolic(g: Any, x: Any, size: Any) -> Any:
    from torch.onnx import errors

    if any(output.uses() for output in list(g.original_node.outputs())[1:]):
        raise errors.SymbolicValueError("the indices of adaptive_max_pool are not exported", x)
    result = _adaptive_max_pool(g, x, integers(g, size), dims=_last_unknown(sizes(x)))
    return result, result


def _affine_grid_symbolic(g: Any, theta: Any, size: Any, align_corners: Any) -> Any:
    dims = g.original_node.output().type().sizes()
    return _affine_grid(g, theta, integers(g, size), align_corners, dims=[*[None] * (len(dims) - 1), dims[-1]])


def _max_unpool_symbolic(g: Any, x: Any, index: Any, size: Any, *_: Any) -> Any:
    return _max_unpool(g, x, index, integers(g, size), dims=_last_unknown(sizes(x)))


_INTERPOLATIONS = {
    "upsample_nearest1d": ("nearest", False),
    "upsample_nearest2d": ("nearest", False),
    "upsample_nearest3d": ("nearest", False),
    "_upsample_nearest_exact1d": ("nearest-exact", False),
    "_upsample_nearest_exact2d": ("nearest-exact", False),
    "_upsample_nearest_exact3d": ("nearest-exact", False),
    "upsample_linear1d": ("linear", False),
    "upsample_bilinear2d": ("bilinear", False),
    "upsample_bicubic2d": ("bicubic", False),
    "upsample_trilinear3d": ("trilinear", False),
    "_upsample_bilinear2d_aa": ("bilinear", True),
    "_upsample_bicubic2d_aa": ("bicubic", True),
}

_SYMBOLICS = {
    **{f"aten::{name}": partial(_interpolate_symbolic, *how) for name, how in _INTERPOLATIONS.items()},
    "aten::_convolution": _convolution_symbolic,
    "aten::_convolution_mode": _convolution_mode_symbolic,
    "aten::pixel_shuffle": _pixel_shuffle_symbolic,
    "aten::instance_norm": _instance_norm_symbolic,
    "aten::group_norm": _group_norm_symbolic,
    "aten::avg_pool1d": _avg_pool_symbolic,
    "aten::avg_pool3d": _avg_pool_symbolic,
    **{f"aten::adaptive_avg_pool{n}d": _adaptive_avg_pool_symbolic for n in (1, 2, 3)},
    "aten::affine_grid_generator": _affine_grid_symbolic,
    **{f"aten::max_unpool{n}d": _max_unpool_symbolic for n in (2, 3)},
    **{f"aten::adaptive_max_pool{n}d": _adaptive_max_pool_symbolic for n in (1, 2, 3)},
}
