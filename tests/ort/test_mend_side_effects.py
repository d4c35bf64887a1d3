"""What forward does beside its outputs is refused, because a graph does not repeat it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ortlaunch.errors import RequestError
from tests.ort.precise import assert_model_as_in_fp64

Wrap = Callable[..., nn.Module]


class Net(nn.Module):
    """Does something with its weight before it uses it."""

    def __init__(self, act: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self.weight)
        return x * self.weight


def without_gradients(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def element(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] = 1.0


def replaced(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-1, 1)


def into(weight: nn.Parameter) -> None:
    torch.clamp(weight.data, -1, 1, out=weight.data)


@pytest.mark.parametrize(
    "act",
    [lambda weight: weight.data.clamp_(-1, 1), without_gradients, element, replaced, into],
    ids=["data", "no_grad", "element", "replaced", "out"],
)
def test_a_changed_parameter_is_refused(to_ort: Wrap, act: Callable[[nn.Parameter], object]) -> None:
    with pytest.raises(RequestError, match=rf"changes the parameter weight \({re.escape(__file__)}:\d+\)"):
        to_ort(Net(act))(torch.randn(2, 4))


def test_a_hook_of_a_gradient_is_refused_with_its_line(to_ort: Wrap) -> None:
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# the hook's line")
    )

    def doubled(weight: nn.Parameter) -> None:
        (weight * 2).register_hook(lambda gradient: gradient * 2)  # the hook's line

    with pytest.raises(RequestError, match=rf"hook of a tensor's gradient \({re.escape(__file__)}:{line}\)"):
        to_ort(Net(doubled))(torch.randn(2, 4))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_largest_norm_is_refused(to_ort: Wrap, layer: type[nn.Module]) -> None:
    # This norm is never reached, so no weight changes here.
    model = layer(5, 4, max_norm=100.0)
    with pytest.raises(RequestError, match="an Embedding with max_norm changes its weight"):
        to_ort(model)(torch.tensor([[0, 1, 4]]))


def test_what_only_reads_the_weight_is_not_refused(to_ort: Wrap) -> None:
    model = Net(lambda weight: (weight.data.clone().clamp_(0, 1), weight.detach() + 1))
    to_ort(model)(torch.randn(2, 4)).sum().backward()


def test_gradients_that_forward_computes_are_refused_with_their_line(to_ort: Wrap) -> None:
    def slope(weight: nn.Parameter) -> None:
        torch.autograd.grad(weight.square().sum(), weight, create_graph=True)

    with pytest.raises(RequestError, match=r"`torch.autograd.grad\(.*test_mend_side_effects.py:\d+ computes gradients"):
        to_ort(Net(slope))(torch.randn(2, 4))


def test_a_function_over_samples_is_no_side_effect(to_ort: Wrap) -> None:
    """Inside ``torch.vmap`` tensors have no memory of their own."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda one: one @ one.T @ one)(x) + torch.vmap(self.layer, in_dims=1, out_dims=1)(x)

    torch.manual_seed(0)
    assert_model_as_in_fp64(to_ort, Mapped(), torch.randn(2, 5, 4), torch.randn(3, 5, 4))
