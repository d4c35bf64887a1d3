"""Operators that onnxruntime 1.19.2 or torch's exporter lacks, computes wrongly or differentiates wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ort.precise import Case, assert_as_in_fp64, assert_model_as_in_fp64

Wrap = Callable[..., nn.Module]
DRAWS = pytest.mark.parametrize("draw", [0, pytest.param(1, marks=pytest.mark.nightly)], ids=["draw0", "draw1"])


def scatters(rng: random.Random) -> dict[str, Case]:
    both = ((5, 4), (3, 4))
    index = [((3, 4), 5)]

    def reduce(how: str, include: bool) -> Case:
        return Case(lambda a, b, i: a.scatter_reduce(1, i, b, how, include_self=include), both, index)

    def row(x: Tensor) -> Tensor:
        """One index for all samples, with repeated values."""
        return x[0, :, 0] % 3

    return {
        "scatter_add": Case(lambda a, b, i: a.scatter_add(1, i, b), both, index),
        "scatter_add_to_constant": Case(lambda a, b, i: a.scatter_add(1, i, b), both, index, frozen=[0]),
        "scatter_add_of_constant": Case(lambda a, b, i: a.scatter_add(1, i, b), both, index, frozen=[1]),
        "scatter_add_to_zeros": Case(lambda b, i: torch.zeros_like(b).scatter_add(1, i % 3, b), [(3, 4)], index),
        **{how: reduce(how, rng.random() < 0.5) for how in ("sum", "prod", "mean", "amax", "amin")},
        "index_add": Case(lambda a, b, i: a.index_add(1, row(i), b, alpha=0.5), both, index),
        "index_copy": Case(lambda a, b, i: a.index_copy(1, torch.tensor([4, 0, 2]), b), both, index),
        "index_fill": Case(lambda a, i: a.index_fill(1, row(i), 2.0), [(5, 4)], index),
        "assigned_behind_whole_dimensions": Case(_assigned, both, index),
        "assigned_column": Case(_assigned_column, both, index),
        "without_diagonal": Case(lambda a: a.masked_fill(torch.eye(4, dtype=torch.bool), 2.0), [(4, 4)]),
        "gathered_by_full": Case(lambda a: a.gather(1, torch.full((a.shape[0], 1, 4), 2)), [(5, 4)]),
        "diagonal": Case(lambda a: (a[0] * 1.0).fill_diagonal_(0.5) * a, [(5, 4)]),
        "index_put": Case(
            lambda a, b, i: a.index_put((torch.arange(a.shape[0])[:, None], i[:, :, 0]), b, accumulate=True),
            both,
            index,
        ),
    }


def _assigned(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    result = a * 1.0
    result[..., [0, 3]] = a[..., [1, 2]] * 2
    result[:, [1, 2]] = b[:, :2]
    return result


def _assigned_column(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    result = a * 1.0
    result[:, 3] = b[:, 0]
    result[:, :, 1] = a[:, :, 0] * 2
    return result


def interpolations(rng: random.Random) -> dict[str, Case]:
    def case(mode: str, rank: int, **options: Any) -> Case:
        if rng.random() < 0.3:
            size = {"size": [rng.randint(3, 9) for _ in range(rank)]}
        else:
            size = {"scale_factor": [rng.choice([0.6, 0.7, 1.3, 1.7, 2.0]) for _ in range(rank)]}
        if mode in ("linear", "bilinear", "bicubic", "trilinear"):
            options["align_corners"] = rng.random() < 0.5
        shape = (2, *(rng.randint(5, 10) for _ in range(rank)))
        return Case(lambda x: functional.interpolate(x, mode=mode, **size, **options), [shape])

    modes = {"linear": [1], "bilinear": [2], "bicubic": [2], "trilinear": [3]}
    modes |= {mode: [1, 2, 3] for mode in ("nearest", "nearest-exact", "area")}
    found = {f"{mode}{rank}": case(mode, rank) for mode, ranks in modes.items() for rank in ranks}
    found["antialias"] = case("bilinear", 2, antialias=True)
    return found


def saturated(_rng: random.Random) -> dict[str, Case]:
    """Functions far from zero, where they are tiny; a large factor makes all of their digits count."""

    def gated(x: Tensor, layer: nn.Module) -> Tensor:
        first = x.mean(1)[None] * 1e6
        return layer(x * 30, (first * 1e-6, first) if isinstance(layer, nn.LSTM) else first)[0]

    def binary(x: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(x + 20, torch.ones_like(x)) * 1e8

    return {
        "sigmoid": Case(lambda x: (x - 25).sigmoid() * 1e10),
        "sigmoid_in_place": Case(lambda x: (x - 25).sigmoid_() * 1e10),
        "share": Case(lambda x: (x - 40).sigmoid() / (x - 40).sigmoid().sum(-1, keepdim=True)),
        "silu": Case(lambda x: functional.silu(x - 25) * 1e10),
        "silu_by_hand": Case(lambda x: (x - 25) * torch.sigmoid(x - 25) * 1e10),
        "glu": Case(lambda x: functional.glu(torch.cat([x, x - 25], -1)) * 1e10),
        "logsigmoid": Case(lambda x: functional.logsigmoid(x + 20) * 1e8),
        "binary_cross_entropy": Case(binary),
        "log1p": Case(lambda x: torch.log1p(x * 1e-6) * 1e6),
        "of_integers": Case(lambda x, i: x * (i - 25).sigmoid() * 1e10, integers=[((5, 4), 5)]),
        **{kind: Case(gated, modules=[getattr(nn, kind)(4, 4, batch_first=True)]) for kind in ("LSTM", "GRU")},
    }


def of_zeros(_rng: random.Random) -> dict[str, Case]:
    """Where a root is taken of zero, but its gradient is zero or that of the epsilon."""
    both = ((5, 4), (5, 4))
    return {
        "std": Case(lambda x: (x * 0).std(-1) + x[:, :, :1].std(-1, correction=0)),
        "std_mean": Case(lambda x: sum(torch.std_mean(x * 0, dim=1))),
        "roll": Case(lambda x: x.roll((-7, 9, 1), (1, 2, 0)) + x.roll(5, 0) * x.roll(1, -1) + x.roll(3)),
        "std_of_all": Case(lambda x: x * x.std()),
        "cosine_of_zeros": Case(lambda x, y: functional.cosine_similarity(x * 0, y, dim=-1), both),
        "cosine_with_epsilon": Case(lambda x, y: functional.cosine_similarity(x, y * 1e-3, dim=1, eps=0.5), both),
        "cosine_of_tiny": Case(lambda x, y: functional.cosine_similarity(x * 1e-22, y, dim=1, eps=1e-30), both),
        "norm": Case(lambda x: torch.linalg.norm(x * 0, dim=(1, 2)) + torch.linalg.norm(x * 0)),
        "matrix_norm": Case(lambda x: torch.linalg.matrix_norm(x * 0, keepdim=True) + x),
        "power_of_zero": Case(lambda x: (x * (x > 0))[..., None] ** torch.arange(3) + ((x * 0) ** 0)[..., None]),
        "cosine_of_pairs": Case(lambda x, y: functional.cosine_similarity(x[:, :, None], y[:, None], dim=-1), both),
    }


def limited(_rng: random.Random) -> dict[str, Case]:
    """Limits that are tensors, learnt ones of one element too; values that are at them, equal, or only ordered."""
    both = ((5, 4), (5, 4))

    def at_zero(x: Tensor) -> Tensor:
        return x - x.detach()

    return {
        "learnt": Case(lambda x, y: x.clamp(-y[0, 0, 0].abs(), y[0, 0, 1].abs()), both),
        "learnt_maximum": Case(lambda x, y: torch.clamp_max(x, y[0, 0, 0]), both),
        "at_both": Case(lambda x, y: torch.clamp(at_zero(x), at_zero(y), torch.zeros(4)) + y, both),
        "largest_of_equal": Case(
            lambda x: at_zero(x).topk(2, 1)[0] + at_zero(x).topk(2, 1, largest=False)[1] * x[:, :2]
        ),
        "orders_alone": Case(lambda x, y: x * y.argsort(1) + x * y.topk(4)[1] + x * y.max(1, keepdim=True)[1], both),
        "falling": Case(lambda x: functional.leaky_relu(x, -0.2)),
        "below": Case(lambda x, y: at_zero(x).clamp(min=at_zero(y)) + x * y, both),
    }


def squeezed(_rng: random.Random) -> dict[str, Case]:
    """Dimensions of another size than 1 stay."""
    return {
        "none": Case(lambda x: x.squeeze(-1) * x.squeeze(1)),
        "one_of_two": Case(lambda x: x.mean(1, keepdim=True).squeeze((1, 2)).sin()),
        "in_place": Case(lambda x: (x * 1.0).squeeze_(2).cos()),
    }


def rounded(_rng: random.Random) -> dict[str, Case]:
    """Divisions of negative numbers that round down or towards zero, remainders, and integers as numbers."""
    whole = [((5, 4), 9)]

    def case(function: Callable[[Tensor, Tensor], Tensor]) -> Case:
        def scaled(x: Tensor, i: Tensor) -> Tensor:
            found = function(i - 4, i.flip(1) - 11)
            return x * (found if found.is_floating_point() else found.to(x.dtype))

        return Case(scaled, integers=whole)

    def slices(x: Tensor) -> Tensor:
        length, half = x.size(1), x.size(2) >> 1
        return x[:, : -(-length // 4)].mean(1) + x[:, : (length - 1) // 2].sum(1) + x[..., :half].mean()

    return {
        "floor": case(lambda i, j: i // 2 + i // -3 + i // j),
        "floor_of_a_number": case(lambda i, j: 7 // j + torch.floor_divide(i, j)),
        "floor_of_int32": case(lambda i, j: i.int() // j.int() + i.int() // 3),
        "floor_of_fractions": case(lambda i, j: (i // 2.5) + (i / 2) // 0.7),
        "modes": case(lambda i, j: torch.div(i, j, rounding_mode="floor") - torch.div(i, 3, rounding_mode="trunc")),
        "shifts": case(lambda i, j: (i >> 1) + (i << 1) + (j.int() >> 2)),
        "remainders": case(lambda i, j: (i / 2) % 0.7 + i % j + torch.fmod(i, j) + torch.fmod(i / 2, -0.7)),
        "sizes": Case(slices, [(7, 6)]),
        "exponential": case(lambda i, j: i.exp() + i.expm1() + i.sin() + i.cosh()),
        "angle": case(lambda i, j: torch.atan2(i, j)),
        "whole": case(lambda i, j: i.ceil() + i.floor() + i.relu() + i.count_nonzero(1)[:, None]),
        "inverse": case(lambda i, j: i.unique(return_inverse=True)[1]),
        "logsumexp": case(lambda i, j: i.logsumexp(1, keepdim=True)),
    }


def convolutions(rng: random.Random) -> dict[str, Case]:
    def case(rank: int) -> Case:
        groups, stride = rng.choice([1, 2]), rng.randint(1, 3)
        layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1](
            4,
            6,
            kernel_size=[rng.randint(1, 3) for _ in range(rank)],
            stride=stride,
            padding=rng.randint(0, 1),
            output_padding=stride - 1,
            dilation=rng.randint(stride, 3),
            groups=groups,
            bias=rng.random() < 0.7,
        )
        return Case(lambda x, layer: layer(x), [(4, *(rng.randint(3, 5) for _ in range(rank)))], modules=[layer])

    return {f"transposed{rank}": case(rank) for rank in (1, 2, 3)}


def images(rng: random.Random) -> dict[str, Case]:
    volumes = {1: (4, 8), 2: (4, 8, 7), 3: (4, 8, 7, 6)}
    found = {
        "grid_sample": Case(functional.grid_sample, [(3, 5, 4), (2, 3, 2)]),
        "transformed": Case(
            lambda x, t: functional.grid_sample(x, functional.affine_grid(t, x.shape)), [(3, 5, 4), (2, 3)]
        ),
        "unpooled": Case(
            lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2), [(4, 8, 6)]
        ),
        "pixel_shuffle": Case(lambda x: functional.pixel_shuffle(x, 2), [(8, 3, 4)]),
        "group_norm": Case(lambda x: functional.group_norm(x, 2), [volumes[2]]),
        "squeeze": Case(lambda x: x * functional.adaptive_avg_pool3d(x, 1), [volumes[3]]),
    }
    for rank, shape in volumes.items():
        size = [rng.randint(1, 4) for _ in range(rank)]
        norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1](4, affine=rng.random() < 0.7)
        pads = [rng.randint(0, 2) for _ in range(2 * rank)]
        found |= {
            f"instance_norm{rank}": Case(lambda x, norm: norm(x), [shape], modules=[norm]),
            f"adaptive_max{rank}": Case(_pool(f"adaptive_max_pool{rank}d", size), [shape]),
            f"adaptive_avg{rank}": Case(_pool(f"adaptive_avg_pool{rank}d", size), [shape]),
            f"reflect{rank}": Case(partial(functional.pad, pad=pads, mode="reflect"), [shape]),
            f"replicate{rank}": Case(partial(functional.pad, pad=pads, mode="replicate"), [shape]),
            f"max{rank}": Case(_pool(f"max_pool{rank}d", 3, padding=1, ceil_mode=rng.random() < 0.5), [shape]),
            f"max_indices{rank}": Case(_max_and_index(f"max_pool{rank}d"), [shape]),
        }
        if rank != 2:
            options = {
                "stride": rng.randint(1, 3),
                "padding": 1,
                "ceil_mode": rng.random() < 0.5,
                "count_include_pad": rng.random() < 0.5,
            }
            found[f"avg{rank}"] = Case(_pool(f"avg_pool{rank}d", 3, **options), [shape])
    return found


def _pool(name: str, size: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(functional, name)(x, size, **options)


def _max_and_index(name: str) -> Callable[[Tensor], Tensor]:
    def pooled(x: Tensor) -> Tensor:
        values, index = getattr(functional, name)(x, 2, return_indices=True)
        return values * (index % 3)

    return pooled


def powers(rng: random.Random) -> dict[str, Case]:
    pair = ((5, 4), (5, 4))
    found = {
        "pow": Case(lambda a, b: a**b, pair, positive=True),
        "pow_of_one": Case(lambda a: a ** (a * 2), positive=True),
        "pow_broadcast": Case(lambda a, b: a[:, :1] ** b + a ** b[0, 0], pair, positive=True),
        "pow_exponent": Case(lambda a: 2.0**a),
        "pow_of_constant": Case(lambda a, b: a**b, pair, positive=True, frozen=[0]),
        "pow_by_constant": Case(lambda a, b: a**b, pair, positive=True, frozen=[1]),
        "pow_zero": Case(lambda a, b: functional.relu(a - 0.5) ** (b + 1), pair, positive=True),
        "pow_of_a_norm": Case(lambda a: a * a.norm(2) ** 2 * 0.1),
        "prelu": Case(lambda x, layer: layer(x), modules=[nn.PReLU(5)]),
    }
    names = ["tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "atanh", "expm1", "erfc", "erfinv", "lgamma"]
    for name in (*names, "digamma", "sinc", "i0", "sign", "floor", "ceil", "round", "trunc", "frac"):
        found[name] = Case(_scaled(getattr(torch, name)), positive=True)
    for name in ("hardswish", "hardsigmoid", "mish", "selu", "elu", "celu", "softplus"):
        found[name] = Case(_scaled_up(getattr(functional, name)))
    found["elu_alpha"] = Case(partial(functional.elu, alpha=rng.uniform(0.1, 2)))
    found["softplus_beta"] = Case(partial(functional.softplus, beta=rng.uniform(0.5, 3), threshold=1.0))
    found["threshold"] = Case(partial(functional.threshold, threshold=rng.uniform(-1, 1), value=0.5))
    return found


def _scaled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Keeps the values in the domain, and the gradient of a piecewise constant function visible."""
    return lambda x: function(x * 0.2) + x


def _scaled_up(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reaches the limits of an activation."""
    return lambda x: function(3 * x)


def reductions(rng: random.Random) -> dict[str, Case]:
    found = {}
    for name in ("amax", "amin", "logsumexp", "norm"):
        dims, keep = rng.sample([1, -1], rng.randint(1, 2)), rng.random() < 0.5
        found[name] = Case(partial(getattr(torch, name), dim=dims, keepdim=keep))
    for name in ("cumsum", "cumprod", "logcumsumexp", "prod"):
        found[name] = Case(partial(getattr(torch, name), dim=rng.choice([1, 2, -1])))
    found |= {
        "normalize": Case(partial(functional.normalize, dim=rng.choice([1, 2]))),
        "cumsum_of_integers": Case(lambda x, i: x * (i > 1).cumsum(1), integers=[((5, 4), 4)]),
        "mT": Case(lambda x: x.mT @ x),
        "mH": Case(lambda x: x.mH @ x),
        "H": Case(lambda x: x.flatten(0, 1).H.sin()),
        "split": Case(_joined(Tensor.split, rng.randint(2, 4))),
        "unsafe_split": Case(_joined(Tensor.unsafe_split, rng.randint(2, 4))),
        "unsafe_chunk": Case(_joined(Tensor.unsafe_chunk, rng.randint(2, 4))),
    }
    return found


def _joined(split: Callable[..., Any], count: int) -> Callable[[Tensor], Tensor]:
    """Joins the parts again, each with a factor of its own."""
    return lambda x: torch.cat([part * (number + 1) for number, part in enumerate(split(x, count, 1))], 1)


def written(rng: random.Random) -> dict[str, Case]:
    """Assignments to elements whose value is broadcast, by tensors of indices and by masks."""

    def assigned(index: Callable[[Tensor, Tensor], Any], value: Callable[[Tensor, Tensor], Any]) -> Case:
        def function(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
            result = a * 1.0
            result[index(a, i)] = value(a, b)
            return result + a

        return Case(function, [(3, 4), (4,)], [((3,), 3)])

    def samples(a: Tensor) -> Tensor:
        return torch.arange(a.shape[0])

    return {
        "row": assigned(lambda a, i: (samples(a), i[:, 0]), lambda a, b: b[0]),
        "one": assigned(lambda a, i: (samples(a), i[:, 0]), lambda a, b: b[0, :1]),
        "elements": assigned(lambda a, i: (samples(a), i[:, 0], i[:, 1]), lambda a, b: b[0, 0]),
        "rows": assigned(lambda a, i: (samples(a)[:, None], i[:, :2]), lambda a, b: b[:, None]),
        "behind": assigned(lambda a, i: (torch.tensor([-1, 0]), torch.tensor([2, -3])), lambda a, b: b[0]),
        "samples_and_columns": assigned(lambda a, i: (slice(0, 1), slice(None), [2, 1]), lambda a, b: b[0, :2]),
        "rows_by_a_mask": assigned(lambda a, i: a[..., 0] > 0, lambda a, b: b[0]),
        "mask_and_index": assigned(lambda a, i: (a[:, 0, 0] > -9, 1), lambda a, b: b[0]),
        "part": Case(lambda a, b, i: a[:, 1].index_put((i[:, 0],), b[0, 0]) + a[:, 0], [(3, 4), (4,)], [((3,), 1)]),
        "mask_of_a_part": Case(_masked_part, [(3, 4), (4,)]),
        "mask_of_elements": assigned(lambda a, i: a > 0, lambda a, b: 0.5),
        "mask_of_elements_gradient": assigned(lambda a, i: a > 0, lambda a, b: b[0, 0]),
    }


def _masked_part(a: Tensor, b: Tensor) -> Tensor:
    result = a * 1.0
    result[..., -1][a[..., 0] > 0] = 0.3
    result[:, 1][a[:, 0] > 0] = b[0, 0]
    return result + a


def chosen(rng: random.Random) -> dict[str, Case]:
    """``torch.where`` with choices of fewer elements than the result."""

    def case(first: Callable[[Tensor, Tensor], Any], second: Callable[[Tensor, Tensor], Any]) -> Case:
        return Case(lambda a, b: torch.where(a > 0, first(a, b), second(a, b)) + a, [(3, 4), (4,)])

    return {
        "one": case(lambda a, b: b[0, :1], lambda a, b: a),
        "number": case(lambda a, b: a, lambda a, b: b[0, 0]),
        "row": case(lambda a, b: b[0], lambda a, b: a.mean(0, keepdim=True)),
        "both": case(lambda a, b: b[:, None], lambda a, b: b[0, :1]),
        "larger_condition": case(lambda a, b: b[0, :1], lambda a, b: b[0, 1:2]),
        "filled": Case(lambda a, b: a.masked_fill(a > 0, b[0, 0]) + a, [(3, 4), (4,)]),
        "method": Case(lambda a, b: a.where(a > 0, b[0, :1]) + b[0].where(b[0] > 1, a), [(3, 4), (4,)]),
        "through_a_view": Case(_broadcast_into, [(3, 4), (4,)]),
    }


def _broadcast_into(a: Tensor, b: Tensor) -> Tensor:
    result = a * 1.0
    part = result.narrow(-1, 1, 2)
    part.copy_(b[0, :1])
    return result[..., :1].sum(-1) + part.sum(-1) * result[..., 3:].sum(-1) + a.sum(-1)


def of_a_size(rng: random.Random) -> dict[str, Case]:
    """Tables whose length is a size of the input."""
    return {
        "linspace": Case(lambda x: x * torch.linspace(0.5, 1.5, x.size(0), dtype=x.dtype)[:, None, None]),
        "steps": Case(lambda x: x * torch.arange(0, 100, 0.1, dtype=x.dtype)[-4:].sin()),
        "steps_of_a_size": Case(lambda x: x * torch.arange(0, x.size(1) * 20, 0.1, dtype=x.dtype)[-4:].sin()),
        "of_one": Case(lambda x: x * torch.linspace(0.5, 1.5, 1, dtype=x.dtype)),
        "of_integers": Case(lambda x: x * torch.linspace(0, 9, x.size(0), dtype=torch.long)[:, None, None]),
    }


def numbers(rng: random.Random) -> dict[str, Case]:
    """Reductions of a tensor without dimensions."""

    def case(function: Callable[[Tensor], Tensor]) -> Case:
        return Case(lambda x: x * function(x.mean() + 0.1))

    return {
        "amax": case(lambda a: torch.amax(a)),
        "amin": case(lambda a: a.amin(0)),
        "logsumexp": case(lambda a: a.logsumexp(0)),
        "prod": case(lambda a: a.prod()),
        "sum": case(lambda a: a.sum(0) + a.mean(-1, keepdim=True)),
        "prod_of_all": Case(lambda x: x * x[0, 0].prod()),
        "prod_of_integers": Case(lambda x, i: x * (i + 1).prod(-1)[:, None, None], integers=[((3,), 4)]),
    }


def distances(rng: random.Random) -> dict[str, Case]:
    return {
        **{f"p{p:.0f}": Case(lambda a, b, p=p: torch.cdist(a, b, p=p), [(5, 4), (3, 4)]) for p in (1.0, 2.0, 3.0)},
        "of_itself": Case(lambda a: torch.cdist(a, a, p=1.0) @ a),
    }


HAS_AMINMAX = torch.__version__ >= "2.7"
"""Eager PyTorch 2.6 cannot differentiate torch.aminmax."""


def rolls(rng: random.Random) -> dict[str, Case]:
    return {
        "flat": Case(lambda x: x.roll(3) * x),
        "two": Case(lambda x: x.roll((1, -2), (1, 2)) * x),
        "tile": Case(lambda x: x.tile((1, 2, 1))[:, ::2] * x),
        "tile_of_the_last": Case(lambda x: x.tile(2)[..., 2:6] * x),
        "counts": Case(lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 1, 1]), dim=1) * x),
        "counts_of_all": Case(lambda x: x * torch.repeat_interleave(x[0, 0], torch.tensor([1, 0, 2, 1]))),
    } | ({"both_ends": Case(lambda x: torch.stack(torch.aminmax(x, dim=1)) * x[:, 0])} if HAS_AMINMAX else {})


def flips(rng: random.Random) -> dict[str, Case]:
    return {
        "last": Case(lambda x, m: m(x).flip(-1) * x, [(4,)], modules=[nn.Linear(4, 4)]),
        "two": Case(lambda x, m: m(x).flip((-1, 1)) * x, [(5, 4)], modules=[nn.Linear(4, 4)]),
        "of_integers": Case(lambda x, i: x * i.flip(1), integers=[((5, 4), 9)]),
    }


def broadcasts(rng: random.Random) -> dict[str, Case]:
    """Operands of whose size 1 the graph does not know, because it is computed."""

    def case(function: Callable[[Tensor, Tensor], Tensor]) -> Case:
        # Without a weight of its own, the input has no size that the graph knows.
        return Case(
            lambda x, m: function(m(x), m(x)[:, : x.size(1) // 5]), [(5, 4)], frozen=[0], modules=[nn.Linear(4, 4)]
        )

    return {
        "add": case(lambda x, first: x + first),
        "subtract": case(lambda x, first: first - x),
        "multiply": case(lambda x, first: x * first),
        "divide": case(lambda x, first: x / (2 + first * first)),
        "larger": case(lambda x, first: torch.maximum(first, x)),
        "where": case(lambda x, first: torch.where(x > 0, x, first) + torch.where(x > 1, first, x)),
        "lerp": case(lambda x, first: torch.lerp(x, first, 0.3)),
        "addcmul": case(lambda x, first: torch.addcmul(x, x, first, value=0.5)),
        "clamp": case(lambda x, first: x.clamp(min=first * 0.5)),
        "expand": case(lambda x, first: first.expand(-1, x.size(1), -1) * x),
        "expand_as": case(lambda x, first: first.expand_as(x) * x),
        "of_fewer_dimensions": case(lambda x, first: x[0] * first),
        "nested": Case(
            lambda x, m: m(x) + torch.tanh(m(x)[:, :3][:, :1]), [(5, 4)], frozen=[0], modules=[nn.Linear(4, 4)]
        ),
    }


def cuts(rng: random.Random) -> dict[str, Case]:
    return {
        "at_places": Case(lambda x: torch.cat(x.tensor_split((1, 4), dim=1)[::-1], 1) * x),
        "at_a_tensor": Case(lambda x: torch.cat(x.tensor_split(torch.tensor([2, -1]), dim=-1)[::-1], -1) * x),
        "into_three": Case(lambda x: torch.cat(x.tensor_split(3, dim=1)[::-1], 1) * x),
    }


def standardized(rng: random.Random) -> dict[str, Case]:
    """Weights computed by calls of PyTorch, of which a convolution needs the sizes; the number of samples varies."""

    def kernel(w: Tensor) -> Tensor:
        return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)

    def of_both(w: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(w, (1, 2, 3), keepdim=True)
        return (w - mean) / deviation

    def rows(w: Tensor) -> Tensor:
        return (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)

    def conv(function: Callable[[Tensor], Tensor]) -> Case:
        layer = nn.Conv2d(3, 4, 3)
        return Case(
            lambda x, layer: functional.conv2d(x, function(layer.weight), layer.bias), [(3, 6, 5)], modules=[layer]
        )

    return {
        "std": conv(kernel),
        "var": conv(lambda w: w / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()),
        "std_mean": conv(of_both),
        "of_a_layer": Case(
            lambda x, layer: functional.linear(x, rows(layer.weight)), [(5, 4)], modules=[nn.Linear(4, 3)]
        ),
        "of_samples": Case(lambda x: (x - x.mean((0, 2), keepdim=True)) / x.std((0, 2), keepdim=True), [(5, 4)]),
        "of_each_sample": Case(lambda x, layer: layer(kernel(x)), [(3, 6, 5)], modules=[nn.Conv2d(3, 4, 3)]),
        "of_samples_and_weights": Case(
            lambda x, layer: layer(x) * torch.hypot(x[..., :3], layer.weight[:, 0]), [(5, 4)], modules=[nn.Linear(4, 3)]
        ),
    }


def contracted(rng: random.Random) -> dict[str, Case]:
    """Products of operands that are broadcast along a label."""
    both = ((5, 4), (3, 4))
    return {
        "over_samples": Case(lambda a, b: torch.einsum("bij,bkj->bik", a, b[:1]), both),
        "over_a_sum": Case(lambda a, b: torch.einsum("bij,bkj->bik", a, b[..., :1]), both),
        "to_a_number": Case(lambda a, b: a * torch.einsum("bij,bij ->", b, b * b), both),
        "without_a_sum": Case(lambda a, b: torch.einsum("bij,bkj->bikj", a[:, :, :1], b), both),
    }


def integers(rng: random.Random) -> dict[str, Case]:
    one, two = [((5, 4), 9)], [((5, 4), 9), ((5, 4), 9)]

    def histogram(x: Tensor, i: Tensor) -> Tensor:
        return x * (torch.histc(i.to(x.dtype), bins=4, min=0, max=8) + torch.bincount(i.flatten(), minlength=9)[:4])

    return {
        "and": Case(lambda x, i, j: x * ((i & j) + (i & 3)), integers=two),
        "or": Case(lambda x, i, j: x * ((i | j) + (i | 4)), integers=two),
        "xor": Case(lambda x, i, j: x * ((i ^ j) + (i ^ 5)), integers=two),
        "not": Case(lambda x, i: x * ~i, integers=one),
        "bitwise": Case(lambda x, i, j: x * torch.bitwise_and(i, torch.bitwise_xor(j, i)), integers=two),
        "masks": Case(lambda x: x * ((x > 0) & ~(x > 1) | (x < -1))),
        "in_place": Case(lambda x, i: x * (i > 3).__iand__(i < 6), integers=one),
        "histograms": Case(histogram, integers=one),
    }


GROUPS = {
    function.__name__: function
    for function in (
        *(scatters, interpolations, convolutions, images, powers, reductions, integers),
        *(written, chosen, of_a_size, numbers, distances, rolls, flips, cuts, broadcasts, saturated, rounded, of_zeros),
        *(limited, squeezed, standardized, contracted),
    )
}


@DRAWS
@pytest.mark.parametrize("group", GROUPS)
def test_operators(to_ort: Wrap, group: str, draw: int) -> None:
    torch.manual_seed(draw)
    assert_as_in_fp64(to_ort, GROUPS[group](random.Random(f"{group} {draw}")), seed=draw)


def recurrent(rng: random.Random, kind: str, dropout: float = 0.0) -> nn.Module:
    """A layer of the kind with drawn options; an LSTM may have projections."""
    options: dict[str, Any] = {
        "num_layers": rng.randint(2, 3),
        "bidirectional": rng.random() < 0.6,
        "bias": rng.random() < 0.7,
        "batch_first": rng.random() < 0.6,
        "dropout": dropout,
    }
    if kind == "LSTM" and rng.random() < 0.5:
        options["proj_size"] = 2
    if kind == "RNN":
        options["nonlinearity"] = rng.choice(["tanh", "relu"])
    return getattr(nn, kind)(4, 3, **options)


class Recurrent(nn.Module):
    """A recurrent layer whose output and final states count; it may get its first states from the input."""

    def __init__(self, layer: nn.Module, has_states: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5, 4) + 0.5)
        self.layer = layer
        self.has_states = has_states

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        count = self.layer.num_layers * (1 + self.layer.bidirectional)
        first = x[:, 0, : self.layer.proj_size or 3].expand(count, -1, -1)
        start = (first, x[:, 1, :3].expand(count, -1, -1)) if isinstance(self.layer, nn.LSTM) else first
        output, states = self.run(x, start if self.has_states else None)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([output.flatten(), *(state.flatten() for state in states)])

    def run(self, x: Tensor, start: Any) -> tuple[Tensor, Any]:
        return self.layer(x if self.layer.batch_first else x.transpose(0, 1), start)


class Packed(Recurrent):
    """The sequences of a batch have lengths of their own; with states of their own they come in the order of these."""

    def run(self, x: Tensor, start: Any) -> tuple[Tensor, Any]:
        lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
        if self.has_states:
            order = lengths.argsort(descending=True)
            x, lengths = x[order], lengths[order]
        first = self.layer.batch_first
        packed = nn.utils.rnn.pack_padded_sequence(
            x if first else x.transpose(0, 1), lengths.cpu(), first, enforce_sorted=self.has_states
        )
        output, states = self.layer(packed, start)
        padded, found = nn.utils.rnn.pad_packed_sequence(output, first, padding_value=0.5, total_length=x.size(1))
        return padded * found.sum(), states


@DRAWS
@pytest.mark.parametrize("model", [Recurrent, Packed])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(to_ort: Wrap, kind: str, model: type[Recurrent], draw: int) -> None:
    rng = random.Random(f"{kind} {draw}")
    torch.manual_seed(draw)
    layer = recurrent(rng, kind)
    model = model(layer, has_states=bool(draw))
    assert_model_as_in_fp64(to_ort, model, torch.randn(2, 5, 4), torch.randn(3, 5, 4))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_drop_between_layers(to_ort: Wrap, kind: str) -> None:
    torch.manual_seed(0)
    eager = Recurrent(recurrent(random.Random(kind), kind, dropout=0.4), has_states=True)
    ort = to_ort(eager)
    x = torch.randn(2, 5, 4)
    assert not torch.equal(ort(x), ort(x))
    # Every element reaches the output with dropout too, and evaluation has none.
    ort(x).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in ort.parameters())
    assert torch.allclose(ort.eval()(x), eager.eval()(x), atol=1e-6)


def test_bags_of_embeddings(to_ort: Wrap) -> None:
    rng = random.Random(0)

    def case(mode: str, weighted: bool = False, **options: Any) -> Case:
        bag = nn.EmbeddingBag(7, 4, mode=mode, **options)
        if weighted:
            return Case(lambda x, i, bag: bag(i, per_sample_weights=x), [(5,)], [((5,), 7)], [bag])
        return Case(lambda x, i, bag: bag(i) * x, [(4,)], [((5,), 7)], [bag])

    def with_offsets(last: bool) -> Case:
        bag = nn.EmbeddingBag(7, 4, include_last_offset=last)

        def bags(x: Tensor, i: Tensor, bag: nn.Module) -> Tensor:
            starts = torch.arange(x.shape[0] + int(last)) * 5
            return bag(i.flatten(), starts) * x

        return Case(bags, [(4,)], [((5,), 7)], [bag])

    cases = {mode: case(mode, padding_idx=rng.choice([None, 1, 3])) for mode in ("sum", "mean", "max")}
    cases |= {"weighted": case("sum", weighted=True), "by_frequency": case("sum", scale_grad_by_freq=True)}
    cases |= {"offsets": with_offsets(last=False), "last_offset": with_offsets(last=True)}
    assert_as_in_fp64(to_ort, cases)


class Interpolated(nn.Module):
    """Position embeddings as DINOv2 has them: resized to the image by its shape, as a size or as a scale."""

    def __init__(self, by_scale: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 16, 4))
        self.patches = nn.Conv2d(3, 4, 2, 2)
        self.by_scale = by_scale

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
        side = int(self.positions.shape[1] ** 0.5)
        grid = self.positions.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        size = {"scale_factor": (float((rows + 0.1) / side), float((columns + 0.1) / side))}
        size = size if self.by_scale else {"size": (rows, columns)}
        grid = functional.interpolate(grid, mode="bicubic", **size)
        return self.patches(x).flatten(2).transpose(1, 2) + grid.permute(0, 2, 3, 1).flatten(1, 2)


@pytest.mark.parametrize("by_scale", [False, True], ids=["size", "scale"])
def test_positions_are_interpolated_by_the_shape_of_the_input(to_ort: Wrap, by_scale: bool) -> None:
    torch.manual_seed(0)
    assert_model_as_in_fp64(to_ort, Interpolated(by_scale), torch.randn(2, 3, 12, 8), torch.randn(3, 3, 12, 8))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_grouped_products(to_ort: Wrap) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4) + 0.5)
            self.weight = nn.Parameter(torch.randn(3, 4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch._grouped_mm(x * self.scale, self.weight, torch.tensor([3, 5, 10], dtype=torch.int32))

    torch.manual_seed(0)
    eager, x = Experts(), torch.randn(10, 4)
    # PyTorch has no such product in fp64.
    results = []
    for model in (eager, to_ort(eager)):
        output = model(x)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


class Interleaved(nn.Module):
    """Rotary positions as Cohere and GLM have them: pairs of neighbours, and dimensions counted from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).view(*x.shape[:-1], 2, 4).transpose(1, 2)
        angles = torch.arange(2.0) * torch.ones_like(x[:, :, :1])
        angles = angles.repeat_interleave(2, dim=-1).unsqueeze(1)
        turned = torch.stack([-hidden[..., 1::2], hidden[..., ::2]], dim=-1).flatten(-2)
        return hidden * angles.cos() + turned * angles.sin()


def test_interleaving_leaves_the_dimensions_of_other_operators_alone(to_ort: Wrap) -> None:
    torch.manual_seed(0)
    assert_model_as_in_fp64(to_ort, Interleaved(), torch.randn(2, 5, 8), torch.randn(3, 7, 8))


def test_a_number_in_the_graph_has_the_shape_of_a_number(to_ort: Wrap) -> None:
    """``new_ones(())`` is known before the run, as in the masks of mixtures of experts."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            seen = x.new_ones((), dtype=torch.bool).detach() & (torch.arange(4) <= torch.tensor(2).detach())
            return torch.where(seen, x * self.scale, x)

    torch.manual_seed(0)
    assert_model_as_in_fp64(to_ort, Masked(), torch.randn(2, 4), torch.randn(3, 4))


def test_a_size_that_became_a_tensor_is_a_number(to_ort: Wrap) -> None:
    """DeBERTa divides by the root of a size; onnxruntime moves its transposition across, by the rank that it knows."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.bias = nn.Parameter(torch.randn(8))

        def heads(self, x: Tensor) -> Tensor:
            return x.view(*x.shape[:-1], 2, 4).permute(0, 2, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.heads(self.layer(x)) + self.heads(self.bias[None, None, :])
            heads = heads / torch.sqrt(torch.tensor(heads.size(-1), dtype=torch.float) * 3).to(heads.dtype)
            return torch.matmul(heads, heads.transpose(-1, -2))

    torch.manual_seed(0)
    assert_model_as_in_fp64(to_ort, Scaled(), torch.randn(2, 5, 8), torch.randn(3, 7, 8))
