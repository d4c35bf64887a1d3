"""Gradients stop under ORTModule where they stop in eager; outputs have eager's dtypes; dropout follows torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)


class Detached(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = self.right(x)
        return self.left(x) * target.detach() + (self.left(target) - target).detach()


class StraightThrough(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.left(x)
        return self.right(hidden + (torch.round(hidden) - hidden).detach())


class NoGrad(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = torch.relu(self.right(x)).chunk(2, -1)
        return self.left(x) * torch.cat(target, -1)


class Switched(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        hidden = self.left(x)
        torch.set_grad_enabled(True)
        return self.right(hidden) + self.left(x)


class DetachedWeight(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.left(x), self.left.weight.detach()) + self.right(x)


class Averaged(Pair):
    """Has buffers that follow weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", torch.randn(4, 4))
        self.register_buffer("rows", torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.lerp_(self.left.weight, 0.1)
            self.rows[0] = self.left.bias
        return self.right(self.left(x) - self.rows.mean(0)) * torch.nn.functional.linear(x, self.teacher)


class Nothing(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


class Checkpointed(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(checkpoint(lambda y: self.left(y).tanh(), x, use_reentrant=False))


@pytest.mark.parametrize(
    "kind", [Detached, StraightThrough, NoGrad, Switched, DetachedWeight, Averaged, Nothing, Checkpointed]
)
def test_gradients_stop_where_eagers_do(assert_parity: Any, kind: type[Pair]) -> None:
    torch.manual_seed(0)
    assert_parity(kind(), {"x": 3 * torch.randn(3, 4)}, {"x": torch.randn(5, 4)})


class Beside(Pair):
    """Returns more than the loss."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.left(x).tanh()
        return {"loss": hidden.square().mean(), "beside": self.right(hidden)}


def test_weights_of_an_output_that_the_loss_does_not_use_get_no_gradient(to_ort: Any) -> None:
    torch.manual_seed(0)
    eager = Beside()
    ort = to_ort(eager)
    x = torch.randn(3, 4)
    for both in (False, True, False):
        found = []
        for model in (eager, ort):
            model.zero_grad()
            outputs = model(x)
            (outputs["loss"] + outputs["beside"].sum() if both else outputs["loss"]).backward()
            found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
        assert len(found[0]) == (4 if both else 2)
        # Zeros would be decayed by an optimizer.
        torch.testing.assert_close(found[1], found[0])


def test_frozen_parameters_stay_frozen(assert_parity: Any) -> None:
    model = Nothing()
    model.left.requires_grad_(False)
    ort = assert_parity(model, {"x": torch.randn(3, 4)})
    agent = ort._torch_module._execution_manager(True)._execution_agent
    ort(x=torch.randn(5, 4)).sum().backward()
    # No second graph had to be built for them.
    assert ort._torch_module._execution_manager(True)._execution_agent is agent


def test_outputs_in_half_precision_stay_so(to_ort: Any) -> None:
    eager = torch.nn.Linear(4, 4).half()
    ort, x = to_ort(eager), torch.rand(3, 4).half()
    output = ort(x)
    assert output.dtype == eager(x).dtype == torch.float16
    output.sum().backward()
    assert ort.weight.grad.dtype == torch.float16
    with torch.no_grad():
        assert ort.eval()(x).dtype == torch.float16


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.layers = torch.nn.ModuleList(torch.nn.Dropout(0.5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(self.weight * x) for layer in self.layers]


def masks(ort: torch.nn.Module, steps: int) -> torch.Tensor:
    """What each layer kept in each step, [steps, layers, 64]."""
    return torch.stack([torch.stack(ort(torch.ones(64))).detach() > 0 for _ in range(steps)])


def test_dropout_follows_torchs_random_numbers(to_ort: Any) -> None:
    ort = to_ort(Dropping())
    torch.manual_seed(3)
    first = masks(ort, 4)
    state = torch.get_rng_state()
    later = masks(ort, 2)
    torch.set_rng_state(state)
    assert torch.equal(masks(ort, 2), later)
    torch.manual_seed(3)
    assert torch.equal(masks(ort, 4), first)


def test_without_dropout_torchs_random_numbers_stay(to_ort: Any) -> None:
    ort = to_ort(Nothing())
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    ort(torch.ones(2, 4))
    assert torch.equal(torch.rand(2), expected)


def test_neighbouring_seeds_share_no_mask(to_ort: Any) -> None:
    """Workers have neighbouring seeds."""
    ort = to_ort(Dropping())
    drawn = []
    for seed in range(8):
        torch.manual_seed(seed)
        drawn.append(masks(ort, 4).flatten(0, 1))
    every = torch.cat(drawn)
    assert len(every.unique(dim=0)) == len(every)


def test_no_element_meets_the_same_fate_for_long(to_ort: Any) -> None:
    torch.manual_seed(0)
    kept = masks(to_ort(Dropping()), 400).float().mean(0)
    assert kept.min() > 0.35
    assert kept.max() < 0.65
