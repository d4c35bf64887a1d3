"""Random operators draw from torch's generator, and their gradients are those of the numbers that they drew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from ortlaunch.base.errors import RequestError

Wrap = Callable[..., nn.Module]


class Net(nn.Module):
    """Scales its input by a weight and calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def _filled_in_part(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[:1].normal_(0.5, 2.0)
    noise[1:2].uniform_()
    return noise


def _in_every_second_row(fill: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def filled(x: Tensor) -> Tensor:
        noise = torch.zeros_like(x)
        fill(noise[:, ::2])
        return x + noise

    return filled


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": _in_every_second_row(Tensor.normal_),
    "uniform": _in_every_second_row(Tensor.uniform_),
    "bernoulli": _in_every_second_row(lambda x: x.bernoulli_(0.4)),
    "bernoulli_of_tensors": _in_every_second_row(lambda x: x.bernoulli_(torch.rand(4))),
    "exponential": _in_every_second_row(Tensor.exponential_),
    "whole": _in_every_second_row(lambda x: x.random_(2, 9)),
    "cauchy": _in_every_second_row(Tensor.cauchy_),
    "geometric": _in_every_second_row(lambda x: x.geometric_(0.4)),
    "log_normal": _in_every_second_row(Tensor.log_normal_),
    "transposed": lambda x: x + torch.empty_like(x).transpose(0, 2).normal_().transpose(0, 2),
    "like_transposed": lambda x: x + torch.randn_like(x.mT).mT * torch.rand_like(x.mT).mT,
    "whole_like_transposed": lambda x: x + torch.randint_like(x.mT, 9).mT,
    "dropout_of_transposed": lambda x: functional.alpha_dropout(x.mT, 0.4, training=True).mT,
    "in_one_row": lambda x: x + torch.zeros_like(x).select(1, 0).normal_().unsqueeze(1),
}


DROPOUTS = {
    **{f"layout_{name}": (function, (20, 4)) for name, function in LAYOUTS.items()},
    "1d": (nn.Dropout1d(0.4), (6, 5)),
    "2d": (nn.Dropout2d(0.3), (6, 5, 4)),
    "3d": (nn.Dropout3d(0.5), (6, 3, 2, 2)),
    "alpha": (nn.AlphaDropout(0.4), (6, 5)),
    "feature_alpha": (nn.FeatureAlphaDropout(0.4), (6, 5, 4)),
    "all": (nn.Dropout2d(1.0), (6, 5, 4)),
    "none": (nn.Dropout2d(0.0), (6, 5, 4)),
    "gumbel": (lambda x: functional.gumbel_softmax(x, tau=0.7), (6, 5)),
    "gumbel_hard": (lambda x: functional.gumbel_softmax(x, hard=True), (6, 5)),
    "bernoulli": (lambda x: x * torch.bernoulli(torch.sigmoid(x).detach()), (6, 5)),
    "rand": (lambda x: x * torch.rand(x.shape[0], 1, 4), (6, 4)),
    "randn": (lambda x: x * torch.randn(6, 4) + torch.rand(4), (6, 4)),
    "rand_like": (lambda x: x * torch.rand_like(x) + torch.randn_like(x), (6, 4)),
    "randn_like_of_another_dtype": (lambda x: x * torch.randn_like(x > 0, dtype=torch.float32), (6, 4)),
    "permutation": (lambda x: x[torch.randperm(x.shape[0])] * x + torch.rand(4), (6, 4)),
    "normal_of_numbers": (lambda x: x * torch.normal(0.5, 2.0, (6, 4)), (6, 4)),
    "normal_of_a_mean": (lambda x: x * torch.normal(x.detach(), 0.3), (6, 4)),
    "normal_of_a_deviation": (lambda x: x * torch.normal(2.0, x.detach().abs()), (6, 4)),
    "normal_of_both": (lambda x: x + torch.normal(x[:, :1].detach(), x.detach().abs()), (6, 4)),
    "normal_in_place": (lambda x: x + torch.empty_like(x).normal_(), (6, 4)),
    "normal_in_place_of_numbers": (lambda x: x + x.new_empty(x.shape[0], 1, 4).normal_(0.5, 2.0), (6, 4)),
    "uniform_in_place": (lambda x: x * torch.empty(x.shape).uniform_(-1.0, 3.0), (6, 4)),
    "bernoulli_in_place": (lambda x: x / 0.7 * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7), (6, 4)),
    "whole_numbers": (lambda x: x * torch.randint(2, 9, (x.shape[0], 1, 4)) + torch.randint(5, (4,)), (6, 4)),
    "whole_numbers_as_places": (lambda x: x[:, torch.randint(6, (3,))], (6, 4)),
    "whole_numbers_below_a_size": (lambda x: x[:, torch.randint(x.shape[0], (3,)) % 6], (6, 4)),
    "whole_numbers_like": (lambda x: x * torch.randint_like(x, 5) + torch.randint_like(x, 2, 9), (6, 4)),
    "whole_numbers_like_of_a_dtype": (lambda x: x * torch.randint_like(x, 2, 9, dtype=torch.int64), (6, 4)),
    "whole_numbers_in_place": (lambda x: x * torch.empty_like(x).random_(5) + torch.empty(4).random_(2, 9), (6, 4)),
    "any_whole_numbers": (lambda x: x + torch.empty(6, 4, dtype=torch.int64).random_() % 7, (6, 4)),
    "whole_numbers_from": (lambda x: x + torch.empty(6, 4, dtype=torch.int64).random_(5, None) % 7, (6, 4)),
    "log_normal": (lambda x: x * torch.empty_like(x).log_normal_(0.1, 0.5), (6, 4)),
    "cauchy": (lambda x: x * torch.empty_like(x).cauchy_(0.1, 0.5).tanh(), (6, 4)),
    "geometric": (lambda x: x * torch.empty_like(x).geometric_(0.4), (6, 4)),
    "poisson": (lambda x: x * torch.poisson(x.exp()), (6, 4)),
    "binomial": (lambda x: x * torch.binomial(torch.full_like(x, 5.0), x.detach().sigmoid()), (6, 4)),
    "multinomial": (lambda x: x + torch.multinomial(x.softmax(-1).flatten(0, 1), 4).view_as(x), (6, 4)),
    "multinomial_of_one_row": (lambda x: x * torch.multinomial(torch.ones(5), 4, replacement=True), (6, 4)),
    "bernoulli_in_place_of_broadcast": (lambda x: x * torch.empty_like(x).bernoulli_(torch.rand(4)), (6, 4)),
    "part_in_place": (lambda x: x + _filled_in_part(x), (6, 4)),
    "torchs_own_generator": (lambda x: x * torch.rand(4, generator=torch.default_generator), (6, 4)),
    "gamma": (lambda x: x + distributions.Gamma(x.exp(), 2.0).rsample(), (6, 4)),
    "gamma_without_gradient": (lambda x: x + distributions.Gamma(x.exp(), 2.0).sample(), (6, 4)),
    "dirichlet": (lambda x: x + distributions.Dirichlet(x.exp()).rsample(), (6, 4)),
    "dirichlet_without_gradient": (lambda x: x + distributions.Dirichlet(x.exp()).sample(), (6, 4)),
    "beta": (lambda x: x + distributions.Beta(x.exp(), 2.0).rsample(), (6, 4)),
    "student": (lambda x: x + distributions.StudentT(x.exp() + 2.0).rsample(), (6, 4)),
    "slopes": (nn.RReLU(0.1, 0.9), (6, 5)),
    "certain": (lambda x: x * torch.bernoulli(torch.ones_like(x)), (6, 5)),
}


class Rows(nn.Module):
    """Several of them, one after the other, in one graph."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({name: torch.rand(DROPOUTS[name][1]) + 0.5 for name in names})

    def forward(self, x: Tensor) -> list[Tensor]:
        return [DROPOUTS[name][0](x * scale) for name, scale in self.scales.items()]


def _groups() -> Iterator[list[str]]:
    """Ten functions of a shape in one graph; modules alone, which may draw in another order."""
    functions = {name: shape for name, (function, shape) in DROPOUTS.items() if not isinstance(function, nn.Module)}
    yield from ([name] for name in DROPOUTS if name not in functions)
    for shape in dict.fromkeys(functions.values()):
        names = [name for name in functions if functions[name] == shape]
        yield from (names[first : first + 10] for first in range(0, len(names), 10))


@pytest.mark.parametrize("names", _groups(), ids=lambda names: names[0])
def test_the_numbers_and_the_gradients_are_those_of_eager_for_the_same_seed(to_ort: Wrap, names: list[str]) -> None:
    shape = DROPOUTS[names[0]][1]
    torch.manual_seed(0)
    eager = Rows(names)
    ort = to_ort(eager)
    ort(torch.randn(2, *shape))
    x = torch.randn(3, *shape)
    for seed in (1, 2):
        results = []
        for model in (eager, ort):
            torch.manual_seed(seed)
            model.zero_grad()
            outputs = model(x)
            sum(output.square().sum() for output in outputs).backward()
            gradients = [scale.grad for scale in model.scales.values()]
            # The next step goes on with the numbers that follow.
            results.append((outputs, gradients, torch.rand(3)))
        for row, name in enumerate(names):
            for mine, theirs in ((results[1][part][row], results[0][part][row]) for part in (0, 1)):
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
        torch.testing.assert_close(results[1][2], results[0][2])


GENERATOR = torch.Generator()
OWN = {
    "rand": lambda x: x * torch.rand(4, generator=GENERATOR),
    "normal_": lambda x: x * torch.empty_like(x).normal_(generator=GENERATOR),
    "multinomial": lambda x: x * torch.multinomial(torch.ones(4), 4, generator=GENERATOR),
}


@pytest.mark.parametrize("name", OWN)
def test_a_generator_of_its_own_is_refused_by_its_statement(to_ort: Wrap, name: str) -> None:
    ort = to_ort(Net(OWN[name], (6, 4)))
    with pytest.raises(
        RequestError, match=rf"`.*{name}.*` at .*test_mend_noise.py:\d+ draws .* a generator of its own"
    ):
        ort(torch.randn(2, 6, 4))


def test_a_seed_that_forward_sets_is_refused_by_its_statement(to_ort: Wrap) -> None:
    def seeded(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x * torch.rand(4)

    ort = to_ort(Net(seeded, (6, 4)))
    with pytest.raises(RequestError, match=r"`torch.manual_seed\(3\)` at .*test_mend_noise.py:\d+ seeds torch's"):
        ort(torch.randn(2, 6, 4))


def test_two_draws_of_one_input_differ(to_ort: Wrap) -> None:
    def twice(x: Tensor) -> Tensor:
        return functional.dropout1d(x, 0.5) - functional.dropout1d(x, 0.5)

    torch.manual_seed(0)
    assert to_ort(Net(twice, (16, 4)))(torch.randn(3, 16, 4)).abs().sum() > 0


@pytest.mark.parametrize("draw", [torch.randn_like, lambda x: torch.randn(x.shape)], ids=["like", "shape"])
def test_a_sample_of_a_normal_distribution_has_the_gradient_of_its_own_numbers(to_ort: Wrap, draw: Any) -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_std = (nn.Parameter(torch.randn(5, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, std = x * self.mean, (x * self.log_std).exp()
            return mean + std * draw(std), std

    torch.manual_seed(0)
    ort, x = to_ort(Sampled()), torch.randn(3, 5, 4)
    for _ in range(2):
        ort.zero_grad()
        sample, std = ort(x)
        sample.square().sum().backward()
        noise = (sample - x * ort.mean) / std
        torch.testing.assert_close(ort.mean.grad, (2 * sample * x).sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ort.log_std.grad, (2 * sample * noise * std * x).sum(0), rtol=1e-4, atol=1e-4)
    assert 0.7 < float(noise.std()) < 1.3


def test_dropped_paths_have_no_gradient(to_ort: Wrap) -> None:
    def drop_path(x: Tensor) -> Tensor:
        mask = 0.5 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype)
        return x.div(0.5) * mask.floor_()

    torch.manual_seed(0)
    eager = Net(drop_path, (64, 1))
    ort, x = to_ort(eager), torch.randn(8, 64, 1)
    output = ort(x)
    output.sum().backward()
    kept = (output != 0).flatten(1).any(1)
    assert 0 < int(kept.sum()) < 8
    torch.testing.assert_close(ort.scale.grad, 2 * x[kept].sum(0))
