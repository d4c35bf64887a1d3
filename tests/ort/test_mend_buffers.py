"""Buffers that forward changes move in training as in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from ortlaunch.ort import session
from tests.ort.parity import compared

Wrap = Callable[..., nn.Module]
STEPS = 4


class Moving(nn.Module):
    """Changes its buffers in the ways in which models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("replaced", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("fixed", torch.ones(4))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self.register_buffer("constant", torch.linspace(0.5, 1.5, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * self.fixed
        # What the backward needs of a buffer is its value before the change.
        out = hidden * (self.average + 1) * self.replaced + self.queue.mean(0)
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.queue[1:] = self.queue[:-1].clone()
            self.queue[0] = hidden[0]
            torch.logical_or(self.seen, hidden.amax(0) > 1, out=self.seen)
            self.unsaved.lerp_(hidden.mean(0), 0.1)
        self.replaced = 0.9 * self.replaced + 0.1 * hidden.detach().abs().amax(0)
        self.calls += 1
        return out / self.calls + self.unsaved.clone() * self.constant


class Normed(nn.Module):
    """Layers under a spectral norm, one of them used twice in a forward."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.convolution = norm(nn.Conv2d(1, 3, 2))
        self.transposed = norm(nn.ConvTranspose2d(3, 2, 2))
        self.twice = norm(nn.Linear(4, 4), n_power_iterations=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.transposed(self.convolution(x.view(-1, 1, 2, 2)).tanh()).flatten(1)
        return self.twice(self.twice(hidden[:, :4]).tanh())


MODELS = {
    "moving": Moving,
    "spectral norm": lambda: Normed(parametrizations.spectral_norm),
    "spectral norm by hooks": lambda: Normed(old_spectral_norm),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_move_as_in_pytorch(to_ort: Wrap, name: str) -> None:
    torch.manual_seed(0)
    eager = MODELS[name]()
    # A forward before the copy would leave tensors that cannot be copied.
    double, ort = copy.deepcopy(eager).double(), to_ort(eager)
    sides = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (double, eager, ort)]
    for step in range(STEPS):
        x = torch.randn(3 + step % 2, 4)
        for model, optimizer in sides:
            optimizer.zero_grad()
            model(x.to(next(model.parameters()).dtype)).square().sum().backward()
            optimizer.step()
        exact, expected, actual = (
            {name: value.double() for name, value in (*model.named_parameters(), *model.named_buffers())}
            for model, _ in sides
        )
        allowed, errors = compared(exact, expected), compared(exact, actual)
        assert {n: e for n, e in errors.items() if e > max(1e-5, 20 * allowed[n])} == {}, step
    assert session.is_active(ort)
    with torch.no_grad():
        for model, _ in sides:
            model.eval()
            model(torch.ones(3, 4, dtype=next(model.parameters()).dtype))
    assert max(compared(*(dict(model.named_buffers()) for model in (eager, ort))).values()) < 1e-5


def test_what_the_trace_does_not_see_leaves_them_as_they_were(to_ort: Wrap) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.untyped_storage().copy_((self.mean + x.mean(0)).untyped_storage())
            return self.linear(x)

    ort = to_ort(Hidden())
    ort(torch.rand(3, 4)).sum().backward()
    assert not ort.mean.any()


class Queue(torch.nn.Module):
    """Training changes a buffer that is not saved; evaluation reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(3, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        if self.training:
            self.queue = torch.cat([hidden.detach().mean(0, keepdim=True), self.queue[:-1]])
        return hidden + self.queue.sum(0)


def test_an_evaluation_reads_buffers_that_are_not_saved_as_training_has_left_them(to_ort: Wrap) -> None:
    eager = Queue()
    ort = to_ort(eager)
    for _ in range(3):
        x = torch.randn(5, 4)
        for model in (eager, ort):
            model.train()
            model(x).sum().backward()
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(ort(x), eager(x))
