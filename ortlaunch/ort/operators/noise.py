"""Random operators, whose numbers come from torch's generator as in eager training.

onnxruntime 1.19.2 and torch's exporter have these faults:

- ``Dropout1d`` to ``Dropout3d``, ``AlphaDropout`` and ``FeatureAlphaDropout`` are not exported in train mode.
- ``exponential_``, and Gumbel-softmax with it, ``randperm``, ``random_``, ``cauchy_``, ``log_normal_``, ``geometric_``,
  ``poisson``, ``binomial``, and the samples of gamma and Dirichlet distributions are not exported.
- ``bernoulli`` of given probabilities returns zeros where the probability is one.
- ``rrelu`` in train mode draws slopes for ONNX's PRelu, which has no gradient.
- ``normal`` with a number as its mean draws one number for all elements; ``normal_`` takes what it fills for the mean,
  and the mean for the standard deviation; ``uniform_`` is not exported.
- ``rand``, ``randn``, ``randint``, ``multinomial`` and the like draw from a generator of ONNX Runtime's own, so that a
  model with stochastic depth or with sampling (DropPath, VAE) could not be compared with PyTorch.

PyTorch fills memory in its own order, and 16 numbers or more of a normal distribution otherwise if they are contiguous.
So draws into other layouts (a transposed tensor, every second row) are told the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.operators.torch_nodes import exact, numbers, torch_node
from ortlaunch.ort.operators.values import integers, number, sizes

_INT64 = 7
"""ONNX's code of the dtype."""
_ALPHA = 1.7580993408473766
"""The negative limit of SELU, with the sign changed."""
WITH_RATE = frozenset(f"ortlaunch::{name}" for name in ("mask", "kept", "alpha_factor", "alpha_shift"))
"""The operators of a dropout; the second input of each is the rate, as `exact` writes it. Without a rate the dropout
returns what it is given, and draws nothing."""
NO_RATE = [0]
"""A rate of zero as `exact` writes it."""
_NAMES = ("rand", "randn")
_DRAWN: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x.uniform_(), lambda x: x.normal_())
_FILLS: tuple[Callable[[Tensor, float, float], Tensor], ...] = (
    Tensor.normal_,
    Tensor.uniform_,
    lambda x, p, _: x.bernoulli_(p),
    Tensor.log_normal_,
    Tensor.cauchy_,
    lambda x, p, _: x.geometric_(p),
)
"""What fills a tensor with random numbers, given two numbers."""
_NORMAL, _UNIFORM, _TRUE, _LOG_NORMAL, _CAUCHY, _GEOMETRIC = range(len(_FILLS))
_SAMPLES: tuple[Callable[[Tensor], Tensor], ...] = (torch.poisson, torch._standard_gamma, torch._sample_dirichlet)
"""What draws a number for each element of a tensor of parameters."""
_POISSON, _GAMMA, _DIRICHLET = range(len(_SAMPLES))


def _features(x: list[Any], _rate: Any, per_feature: Any, *_: Any) -> list[Any]:
    return [*x[:2], *[1] * (len(x) - 2)] if per_feature else x


def _empty(like: Tensor, layout: list[int]) -> Tensor:
    """Returns memory to fill; it is not contiguous, and its dimensions are in an order of their own, with a layout."""
    if not layout:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    *outer, last = (like.shape[dim] for dim in layout)
    places = [layout.index(dim) for dim in range(len(layout))]
    return like.new_empty([*outer, last + 1])[..., :last].permute(places)


def _layout(g: Any) -> list[int]:
    """Returns the dimensions of what an operator draws from the widest steps in memory on; none if it is contiguous."""
    kind = g.original_node.output().type()
    sizes_of, strides = kind.sizes(), kind.strides()
    if not sizes_of or strides is None or torch.empty_strided(sizes_of, strides, device="meta").is_contiguous():
        return []
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


@torch_node("Tensor x, int[] rate, bool per_feature, int[] layout, Tensor? after", shape=_features)
def _kept(x: Tensor, rate: list[int], per_feature: bool, layout: list[int], after: Tensor | None) -> Tensor:
    """Returns 1 for each element or feature that is kept and 0 for the others."""
    (share,) = numbers(rate) or [0.0]
    mask = x.new_empty(_features(list(x.shape), rate, per_feature)) if per_feature else _empty(x, layout)
    return mask.bernoulli_(1.0 - share) if share else mask.fill_(1.0)


@torch_node("Tensor kept, int[] rate")
def _alpha_factor(kept: Tensor, rate: list[int]) -> Tensor:
    """Returns what alpha dropout multiplies each element with."""
    (share,) = numbers(rate) or [0.0]
    return kept.mul(_alpha_scale(share))


@torch_node("Tensor kept, int[] rate")
def _alpha_shift(kept: Tensor, rate: list[int]) -> Tensor:
    """Returns what alpha dropout then adds."""
    (share,) = numbers(rate) or [0.0]
    limit = _ALPHA * _alpha_scale(share)
    return kept.sub(1.0).mul_(limit).add_(limit * share)


def _alpha_scale(share: float) -> float:
    return 1.0 / math.sqrt((_ALPHA * _ALPHA * share + 1.0) * (1.0 - share))


@torch_node("Tensor x, int[] rate, bool per_feature, Tensor? after", shape=_features)
def _mask(x: Tensor, rate: list[int], per_feature: bool, after: Tensor | None) -> Tensor:
    """Returns what dropout multiplies each element or feature with: ones, without a draw, for a rate of zero."""
    (share,) = numbers(rate) or [0.0]
    mask = x.new_empty(_features(list(x.shape), rate, per_feature)) if per_feature else _empty(x, [])
    return mask.bernoulli_(1.0 - share).div_(1.0 - share) if share else mask.fill_(1.0)


@torch_node("Tensor x, int[] rate, int[] layout, Tensor? after")
def _exponential(x: Tensor, rate: list[int], layout: list[int], after: Tensor | None) -> Tensor:
    (scale,) = numbers(rate) or [1.0]
    return _empty(x, layout).exponential_(scale)


@torch_node("Tensor like, Tensor probabilities, int[] layout, Tensor? after")
def _bernoulli(like: Tensor, probabilities: Tensor, layout: list[int], after: Tensor | None) -> Tensor:
    return _empty(like, layout).bernoulli_(probabilities)


@torch_node("Tensor like, int which, int[] layout, Tensor? after")
def _drawn(like: Tensor, which: int, layout: list[int], after: Tensor | None) -> Tensor:
    return _DRAWN[which](_empty(like, layout))


@torch_node("Tensor x, int[] limits, Tensor? after")
def _slopes(x: Tensor, limits: list[int], after: Tensor | None) -> Tensor:
    """Returns what ``rrelu`` multiplies each element with."""
    lower, upper = numbers(limits) or [0.0, 0.0]
    slopes = torch.empty_like(x)
    torch.ops.aten.rrelu_with_noise(x, slopes, lower, upper, True)
    return slopes


@torch_node("Tensor like, Tensor? after")
def _permutation(like: Tensor, after: Tensor | None) -> Tensor:
    return torch.randperm(like.shape[0], dtype=like.dtype, device=like.device)


@torch_node("Tensor like, int which, int[] limits, int[] layout, Tensor? after")
def _filled(like: Tensor, which: int, limits: list[int], layout: list[int], after: Tensor | None) -> Tensor:
    first, second = numbers(limits) or [0.0, 0.0]
    return _FILLS[which](_empty(like, layout), first, second)


@torch_node("Tensor mean, Tensor std, Tensor? after")
def _normal(mean: Tensor, std: Tensor, after: Tensor | None) -> Tensor:
    return torch.normal(mean, std)


@torch_node("Tensor like, int[] limits, int[] layout, Tensor? after")
def _whole(like: Tensor, limits: list[int], layout: list[int], after: Tensor | None) -> Tensor:
    whole = _empty(like, layout)
    return whole.random_(*limits) if len(limits) != 1 else torch.ops.aten.random_(whole, limits[0], None)


@torch_node("Tensor x, int which, Tensor? after")
def _sampled(x: Tensor, which: int, after: Tensor | None) -> Tensor:
    return _SAMPLES[which](x)


@torch_node("Tensor count, Tensor p, Tensor? after")
def _binomial(count: Tensor, p: Tensor, after: Tensor | None) -> Tensor:
    return torch.binomial(count, p)


@torch_node(
    "Tensor like, Tensor weights, int count, bool replacement, Tensor? after",
    shape=lambda _like, weights, count, *_: [*weights[:-1], count],
)
def _chosen(like: Tensor, weights: Tensor, count: int, replacement: bool, after: Tensor | None) -> Tensor:
    return torch.multinomial(weights, count, replacement).to(like.dtype)


@torch_node("Tensor x, Tensor sample, int which", differentiable=(0,))
def _reparametrized(x: Tensor, sample: Tensor, which: int) -> Tensor:
    """Returns what was drawn with the gradient of its parameters, which a second draw would not have."""
    return _Reparametrized.apply(x, sample, which)  # type: ignore[no-any-return]


class _Reparametrized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sample: Tensor, which: int) -> Tensor:
        ctx.save_for_backward(x, sample)
        ctx.which = which
        return sample.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, sample) = grads, ctx.saved_tensors
        if ctx.which == _GAMMA:
            return grad * torch._standard_gamma_grad(x, sample), None, None
        slope = torch._dirichlet_grad(sample, x, x.sum(-1, keepdim=True).expand_as(x))
        return slope * (grad - (sample * grad).sum(-1, keepdim=True)), None, None


_OF_RANDOM = (
    *(_kept, _exponential, _bernoulli, _drawn, _slopes, _permutation, _filled, _normal, _whole),
    *(_sampled, _binomial, _chosen),
)
_NODES = {f"ortlaunch::{node.name}" for node in _OF_RANDOM}


def _last(g: Any) -> Any:
    """Returns what was drawn last in the graph so far; None if nothing was.

    Each draw takes it, although it does not use it, so that ONNX Runtime draws in the order of the program.
    """
    for node in reversed(list(g.block.nodes())):
        if node.hasAttribute("operator") and node.s("operator") in _NODES:
            return node.output()
    return None


def dropout(g: Any, x: Any, rate: float, *, per_feature: bool = False, alpha: bool = False) -> Any:
    """Adds a dropout to the graph; the formulas, and the order of the draws, are PyTorch's.

    Args:
        g: the exporter's graph.
        x: [N, C, ...] if it drops whole features.
        rate: share that is dropped, in 0 to 1.
        per_feature: whether all elements of one sample and channel are dropped together.
        alpha: whether dropped elements get SELU's negative limit, and mean and variance are kept.
    """
    if rate == 0.0:
        return x
    if rate == 1.0:
        # PyTorch draws nothing.
        return g.op("Mul", x, number(g, 0.0, x))
    known = sizes(x)
    dims = [*known[:2], *[1] * (len(known) - 2)] if per_feature else known
    if not alpha:
        return g.op("Mul", x, _mask(g, x, exact([rate]), per_feature, _last(g), dims=dims))
    layout = [] if per_feature else _layout(g)
    kept = _kept(g, x, exact([rate]), per_feature, layout, _last(g), dims=dims)
    # Nodes of their own, since their rate can be set to zero for a comparison without dropout.
    factor, shift = _alpha_factor(g, kept, exact([rate])), _alpha_shift(g, kept, exact([rate]))
    return g.op("Add", g.op("Mul", x, factor), shift)


def _dropout_symbolic(per_feature: bool, alpha: bool, g: Any, x: Any, rate: Any, train: Any) -> Any:
    from torch.onnx import symbolic_helper

    if not symbolic_helper._get_const(train, "b", "train"):
        return x
    share = symbolic_helper._get_const(rate, "f", "p")
    return dropout(g, x, share, per_feature=per_feature, alpha=alpha)


def _exponential_symbolic(g: Any, x: Any, rate: Any, _generator: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    return _exponential(g, x, exact([symbolic_helper._get_const(rate, "f", "lambd")]), _layout(g), _last(g))


def _bernoulli_symbolic(g: Any, x: Any, p: Any = None, _generator: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    given = p is not None and not symbolic_helper._is_none(p)
    if given and _is_number(p):
        return _fill(_TRUE, g, x, sizes(x), p, p)
    # ``bernoulli_`` draws for each element of what it fills, which the probabilities may be broadcast to.
    return _bernoulli(g, x, p if given else x, _layout(g), _last(g), dims=sizes(x))


def _rrelu_symbolic(g: Any, x: Any, lower: Any, upper: Any, train: Any, _generator: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    limits = [symbolic_helper._get_const(limit, "f", "limit") for limit in (lower, upper)]
    if not symbolic_helper._get_const(train, "b", "training"):
        return g.op("LeakyRelu", x, alpha_f=sum(limits) / 2)
    return g.op("Mul", x, _slopes(g, x, exact(limits), _last(g)))


def _randperm_symbolic(g: Any, count: Any, *_: Any) -> Any:
    size = g.op("Reshape", count, g.op("Constant", value_t=torch.tensor([1])))
    zeros = g.op("ConstantOfShape", size, value_t=torch.zeros(1, dtype=torch.int64))
    return _permutation(g, zeros, _last(g), dims=[None])


def _filled_symbolic(which: int, g: Any, like: Any, first: Any, second: Any, _generator: Any = None) -> Any:
    return _fill(which, g, like, sizes(like), first, second)


def _fill(which: int, g: Any, like: Any, dims: list[int | None], first: Any, second: Any) -> Any:
    from torch.onnx import symbolic_helper

    limits = [symbolic_helper._get_const(limit, "f", "limit") for limit in (first, second)]
    return _filled(g, like, which, exact(limits), _layout(g), _last(g), dims=dims)


def _normal_symbolic(g: Any, *arguments: Any) -> Any:
    """Exports ``normal_``, and ``normal`` of two tensors, of a tensor and a number, and of two numbers and a size."""
    if len(arguments) == len(("filled", "mean", "std", "generator")):
        return _filled_symbolic(_NORMAL, g, *arguments)
    mean, std, *rest = arguments
    if len(arguments) > len(("mean", "std", "generator")):
        shape, _generator, dtype, *_ = rest
        return _fill(_NORMAL, g, *_zeros(g, shape, dtype), mean, std)
    is_number = [_is_number(one) for one in (mean, std)]
    if is_number == [True, False]:
        mean = _constant(g, mean, std)
    if is_number == [False, True]:
        std = _constant(g, std, mean)
    shapes = [sizes(one) for one, is_one in zip((mean, std), is_number, strict=True) if not is_one] or [[]]
    dims = shapes[0] if all(one == shapes[0] for one in shapes) else [None] * max(map(len, shapes))
    return _normal(g, mean, std, _last(g), dims=dims)


def _is_number(value: Any) -> bool:
    """Whether it is a number of the program, which the exporter has made a constant of fp64, or one like it."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(value, "t")
    return isinstance(known, Tensor) and known.dim() == 0


def _constant(g: Any, value: Any, like: Any) -> Any:
    from torch.onnx import symbolic_helper

    return number(g, float(symbolic_helper._get_const(value, "t", "value")), like)


def _zeros(g: Any, shape: Any, dtype: Any, default: torch.dtype | None = None) -> tuple[Any, list[int | None]]:
    """Returns zeros of a size that the graph computes, and its sizes, None where one varies."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(shape, "is")
    is_known = not isinstance(known, torch._C.Value)
    kind = symbolic_helper._maybe_get_const(dtype, "i")
    zero = torch.zeros(1, dtype=_dtype(kind) if isinstance(kind, int) else default or torch.get_default_dtype())
    dims = known if is_known else [None] * _length(shape)
    return g.op("ConstantOfShape", integers(g, shape), value_t=zero), dims


def _randint_symbolic(g: Any, *arguments: Any) -> Any:
    """Exports ``randint`` with a lower limit and without."""
    count = len(arguments) - len(("size", "dtype", "layout", "device", "pin_memory"))
    shape, dtype, *_ = arguments[count:]
    zeros, dims = _zeros(g, shape, dtype, torch.int64)
    return _whole(g, zeros, _limits(g, *arguments[:count]), _layout(g), _last(g), dims=dims)


def _limits(g: Any, *limits: Any) -> Any:
    """Returns the limits of whole numbers; one may be a size of the batch, and the lower one is zero by default."""
    one = g.op("Constant", value_t=torch.tensor([1]))
    parts = [g.op("Reshape", g.op("Cast", limit, to_i=_INT64), one) for limit in limits]
    return g.op("Concat", *[g.op("Constant", value_t=torch.tensor([0])), *parts][-2:], axis_i=0)


def _randint_like_symbolic(g: Any, x: Any, *arguments: Any) -> Any:
    """Exports ``randint_like`` with a lower limit and without."""
    count = len(arguments) - len(("dtype", "layout", "device", "pin_memory", "memory_format"))
    return _whole(g, _like(g, x, arguments[count]), _limits(g, *arguments[:count]), _layout(g), _last(g), dims=sizes(x))


def _random_symbolic(g: Any, x: Any, *arguments: Any) -> Any:
    """Exports ``random_`` with both limits, with an upper one, and without."""
    from torch.onnx import symbolic_helper

    *given, _generator = arguments
    if not given:
        return _whole(g, x, [], _layout(g), _last(g), dims=sizes(x))
    if symbolic_helper._is_none(given[-1]):
        least = symbolic_helper._get_const(given[0], "i", "from")
        return _whole(g, x, [least], _layout(g), _last(g), dims=sizes(x))
    return _whole(g, x, _limits(g, *given), _layout(g), _last(g), dims=sizes(x))


def _geometric_symbolic(g: Any, x: Any, p: Any, _generator: Any = None) -> Any:
    return _fill(_GEOMETRIC, g, x, sizes(x), p, p)


def _sample_symbolic(which: int, g: Any, x: Any, _generator: Any = None) -> Any:
    sample = _sampled(g, x, which, _last(g), dims=sizes(x))
    return sample if which == _POISSON else _reparametrized(g, x, sample, which, dims=sizes(x))


def _binomial_symbolic(g: Any, count: Any, p: Any, _generator: Any = None) -> Any:
    return _binomial(g, count, p, _last(g), dims=sizes(count))


def _multinomial_symbolic(g: Any, weights: Any, count: Any, replacement: Any = None, _generator: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    number_of = symbolic_helper._get_const(count, "i", "num_samples")
    repeats = replacement is not None and bool(symbolic_helper._maybe_get_const(replacement, "b"))
    whole = g.op("Constant", value_t=torch.zeros(1, dtype=torch.int64))
    return _chosen(g, whole, weights, number_of, repeats, _last(g), dims=[*sizes(weights)[:-1], number_of])


def _drawn_symbolic(name: str, g: Any, shape: Any, dtype: Any, *_: Any) -> Any:
    """Exports ``rand`` and ``randn``: numbers in the shape of a tensor of zeros, which costs a small buffer."""
    zeros, dims = _zeros(g, shape, dtype)
    return _drawn(g, zeros, _NAMES.index(name), _layout(g), _last(g), dims=dims)


def _drawn_like_symbolic(name: str, g: Any, x: Any, dtype: Any = None, *_: Any) -> Any:
    return _drawn(g, _like(g, x, dtype), _NAMES.index(name), _layout(g), _last(g), dims=sizes(x))


def _like(g: Any, x: Any, dtype: Any) -> Any:
    """Returns a tensor of the shape of another one, of a dtype that the call may name."""
    from torch.onnx import _type_utils, symbolic_helper

    kind = None if dtype is None else symbolic_helper._maybe_get_const(dtype, "i")
    if not isinstance(kind, int) or _dtype(kind) == _type_utils.JitScalarType.from_value(x).dtype():
        return x
    return g.op("Cast", x, to_i=_type_utils.JitScalarType(kind).onnx_type())


def _dtype(kind: int) -> torch.dtype:
    """Returns the dtype of torch's number for it."""
    from torch.onnx import _type_utils

    return _type_utils.JitScalarType(kind).dtype()


def _length(shape: Any) -> int:
    """Returns how many sizes a list in the graph has."""
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_packed_list(shape):
        return len(symbolic_helper._unpack_list(shape))
    size = symbolic_helper._get_tensor_dim_size(shape, 0)
    assert size is not None
    return size


SYMBOLICS = {
    "aten::feature_dropout": partial(_dropout_symbolic, True, False),
    "aten::alpha_dropout": partial(_dropout_symbolic, False, True),
    "aten::feature_alpha_dropout": partial(_dropout_symbolic, True, True),
    "aten::exponential": _exponential_symbolic,
    "aten::bernoulli": _bernoulli_symbolic,
    "aten::rrelu": _rrelu_symbolic,
    "aten::normal": _normal_symbolic,
    "aten::normal_functional": partial(_filled_symbolic, _NORMAL),
    "aten::randint": _randint_symbolic,
    "aten::randint_like": _randint_like_symbolic,
    "aten::random": _random_symbolic,
    "aten::uniform": partial(_filled_symbolic, _UNIFORM),
    "aten::log_normal": partial(_filled_symbolic, _LOG_NORMAL),
    "aten::cauchy": partial(_filled_symbolic, _CAUCHY),
    "aten::geometric": _geometric_symbolic,
    "aten::poisson": partial(_sample_symbolic, _POISSON),
    "aten::_standard_gamma": partial(_sample_symbolic, _GAMMA),
    "aten::_sample_dirichlet": partial(_sample_symbolic, _DIRICHLET),
    "aten::binomial": _binomial_symbolic,
    "aten::multinomial": _multinomial_symbolic,
    "aten::randperm": _randperm_symbolic,
    **{f"aten::{name}": partial(_drawn_symbolic, name) for name in _NAMES},
    **{f"aten::{name}_like": partial(_drawn_like_symbolic, name) for name in _NAMES},
}
