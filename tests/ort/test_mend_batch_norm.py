"""The running statistics of BatchNorm and InstanceNorm under ORTModule are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.registry import build_model


def train(model: torch.nn.Module, steps: int = 5) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = torch.randn(4 + step, 1, 8, 8), torch.randint(0, 10, (4 + step,))
        output = model(x)
        loss = torch.nn.functional.cross_entropy(getattr(output, "logits", output), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_same_state(ort: torch.nn.Module, eager: torch.nn.Module, tolerance: float = 1e-4) -> None:
    actual, expected = ort.state_dict(), eager.state_dict()
    assert list(actual) == list(expected)
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error:.1e}"


def net(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3, bias=False),
        torch.nn.BatchNorm2d(6, **options),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(216, 10, bias=False),
        torch.nn.BatchNorm1d(10),
    )


def test_resnet_has_eagers_parameters_and_buffers_after_five_steps(to_ort: Any) -> None:
    torch.manual_seed(0)
    eager = build_model(ModelConfig(name="resnet")).train()
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model)
    assert_same_state(ort, eager)
    assert {int(v) for k, v in ort.state_dict().items() if k.endswith("num_batches_tracked")} == {5}


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.3, "eps": 1e-2}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_every_kind_of_batch_norm(to_ort: Any, options: dict[str, Any]) -> None:
    eager = net(**options)
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model)
    assert_same_state(ort, eager)
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(ort.eval()(x), eager.eval()(x), rtol=1e-4, atol=1e-4)


def test_only_training_moves_them(to_ort: Any) -> None:
    ort = to_ort(net())
    before = {name: buffer.clone() for name, buffer in ort.named_buffers()}
    ort.eval()
    with torch.no_grad():
        ort(torch.randn(3, 1, 8, 8))
    assert all(torch.equal(buffer, before[name]) for name, buffer in ort.named_buffers())
    ort.train()
    ort(torch.randn(3, 1, 8, 8))
    assert ort.module[1].num_batches_tracked == 1
    assert not torch.equal(ort.module[1].running_mean, before["1.running_mean"])


def test_a_frozen_one_stays_and_a_shared_one_counts_every_call(to_ort: Any) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.frozen, self.linear = (
                torch.nn.BatchNorm1d(64),
                torch.nn.BatchNorm1d(64),
                torch.nn.Linear(64, 10),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.frozen(self.norm(2 * self.norm(x.flatten(1)))))

    eager = Twice()
    eager.frozen.running_mean.fill_(0.3)
    ort = to_ort(eager)
    for model in (eager, ort):
        model.frozen.eval()
        train(model, steps=3)
    assert_same_state(ort, eager)
    assert (ort.norm.training, ort.frozen.training) == (True, False)
    assert (ort.norm.num_batches_tracked, ort.frozen.num_batches_tracked) == (6, 0)


class Activated(torch.nn.BatchNorm2d):
    """Calls the function itself, as timm's BatchNorm with an activation does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return torch.relu(functional.batch_norm(x, *statistics, self.weight, self.bias, True, 0.3, 1e-3))


class Frozen(torch.nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


@pytest.mark.parametrize("kind", [torch.nn.SyncBatchNorm, Activated, Frozen])
def test_a_forward_of_its_own(to_ort: Any, kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    eager = net()
    eager[1] = kind(6)
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model)
    assert_same_state(ort, eager)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_forward_reads_what_the_batch_has_made_of_them(to_ort: Any, momentum: float | None) -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = torch.nn.BatchNorm1d(64, momentum=momentum), torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x.flatten(1)) + self.norm.running_mean / self.norm.num_batches_tracked
            return self.linear(self.norm(y) * self.norm.running_var)

    torch.manual_seed(0)
    eager = Reads()
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model)
    assert_same_state(ort, eager)


def test_variance_below_epsilon(to_ort: Any) -> None:
    eager = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    ort, x = to_ort(eager), 5 + 1e-3 * torch.randn(64, 4)
    eager(x), ort(x)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ort.module[0], name), getattr(eager[0], name), rtol=1e-5, atol=1e-9)


def test_a_mode_set_in_the_model_survives_the_wrapping(to_ort: Any) -> None:
    model = net()
    model[1].eval()
    ort = to_ort(model)
    assert (ort.training, ort.module[1].training, ort.module[5].training) == (True, False, True)


class Own(torch.nn.BatchNorm2d):
    """Calls the function itself, as timm's layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return functional.batch_norm(x, *statistics, self.weight, self.bias, True, self.momentum, self.eps).relu()


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


class Checkpointed(torch.nn.Module):
    """Layers in a checkpoint, the first of which it calls twice, in another checkpoint each."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.first, self.last = torch.nn.Conv2d(1, 6, 3), torch.nn.Linear(216, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer, reentrant in zip([*self.layers, self.layers[0]], (False, True, False), strict=False):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return self.last(x.flatten(1))


def test_what_a_checkpoint_computes_again_moves_them_again(to_ort: Any) -> None:
    """In PyTorch the second computation, in the backward, moves the running statistics too."""
    torch.manual_seed(0)
    inner = torch.nn.Sequential(Own(6), torch.nn.Identity())
    eager = Checkpointed(torch.nn.BatchNorm2d(6, momentum=None), inner)
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model, steps=3)
    assert_same_state(ort, eager)
    assert int(ort.module.layers[0].num_batches_tracked) == 12


def test_another_buffer_that_moves_in_a_checkpoint_is_refused(to_ort: Any) -> None:
    with pytest.raises(
        RequestError, match=r"buffer layers\.0\.calls changes in an activation checkpoint.*backend=eager"
    ):
        to_ort(Checkpointed(Counting()))(torch.randn(4, 1, 8, 8))


@pytest.mark.parametrize("is_frozen", [False, True], ids=["moves", "in eval mode"])
def test_instance_norm(to_ort: Any, is_frozen: bool) -> None:
    torch.manual_seed(0)
    norm = torch.nn.InstanceNorm2d(6, affine=True, track_running_stats=True, momentum=0.3)
    eager = torch.nn.Sequential(torch.nn.Conv2d(1, 6, 3), norm, torch.nn.Flatten(), torch.nn.Linear(216, 10))
    norm.train(not is_frozen)
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model)
    assert_same_state(ort, eager)
    assert bool(norm.running_mean.any()) is not is_frozen
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(ort.eval()(x), eager.eval()(x), rtol=1e-4, atol=1e-4)


def test_batch_norm_of_doubles(to_ort: Any) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net().double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x.double())

    eager = Net()
    ort = to_ort(eager)
    for model in (eager, ort):
        train(model)
    assert_same_state(ort, eager, tolerance=1e-9)
