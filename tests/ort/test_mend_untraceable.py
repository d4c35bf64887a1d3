"""Functions of torch that refuse to be traced, and calls that fail in a trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ortlaunch.errors import RequestError

Wrap = Callable[..., nn.Module]


class Net(nn.Module):
    """A linear layer, and what a test is about."""

    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(4, 4))
        self.plain = nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def other_weights(net: Any, x: Tensor) -> Tensor:
    weights = {"weight": net.plain.weight * 0.5, "bias": net.plain.bias}
    return torch.func.functional_call(net.plain, weights, (x,))


def cached(net: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return net.linear(net.linear(x).tanh())


def branches(net: Any, x: Tensor) -> Tensor:
    return torch.cond(x.mean() > 0, lambda y: net.plain(y), lambda y: net.plain(y).relu() * 2, (x,))


def failing(attempt: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def compute(net: Any, x: Tensor) -> Tensor:
        try:
            x = attempt(x)
        except RuntimeError:
            x = net.plain(x)
        return x * 2

    return compute


@pytest.mark.parametrize(
    "compute",
    [
        other_weights,
        cached,
        branches,
        failing(lambda x: x.view(-1, 7, 3)),
        failing(lambda x: torch.cat([x, x[:, None]])),
        failing(lambda x: x @ torch.zeros(3, 3)),
    ],
    ids=["functional_call", "cached", "cond", "view_fails", "cat_fails", "product_fails"],
)
def test_they_train_as_in_eager(assert_parity: Any, compute: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4).abs()
    assert_parity(Net(compute), {"x": x}, {"x": -x}, {"x": torch.randn(5, 4)})


def gradient(net: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: net.plain(y).tanh().sum())(x)


def products(net: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda y: net.plain(y).tanh(), (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("compute", [gradient, products])
def test_what_differentiates_in_forward_is_refused_with_its_line(to_ort: Wrap, compute: Callable[..., Tensor]) -> None:
    with pytest.raises(
        RequestError, match=rf"`return torch.func.* at \S*{re.escape(Path(__file__).name)}:\d+ computes"
    ):
        to_ort(Net(compute))(torch.randn(3, 4))


def rounded(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.plain(x)


def unrounded(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return net.plain(x)


def test_fewer_bits_in_forward_are_refused_on_the_cpu_with_their_line(to_ort: Wrap) -> None:
    to_ort(Net(unrounded))(torch.randn(3, 4))
    with pytest.raises(RequestError, match=r'`with torch.autocast\("cpu", torch.bfloat16\):` at .* in bfloat16'):
        to_ort(Net(rounded))(torch.randn(3, 4))
