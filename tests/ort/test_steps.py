"""Steps after the first, for which parameters are handed to ONNX Runtime once: they follow whatever changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortlaunch.ort import session

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """Two outputs, one of which not all weights lead to, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, kept: Tensor | None = None, *, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x)) * self.scale * factor
        if kept is not None:
            hidden = torch.where(kept, hidden, 0.0)
        return hidden, self.second(hidden)


@pytest.fixture
def twins(wrap: Wrap) -> tuple[nn.Module, nn.Module]:
    """Eager and wrapped, the same weights; the wrapped one has taken three steps."""
    torch.manual_seed(0)
    eager = Net()
    ort = wrap(copy.deepcopy(eager))
    for _ in range(3):
        assert_alike(eager, ort)
    return eager, ort


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps in which ORTModule itself hands all inputs to ONNX Runtime."""
    session.import_ortmodule()
    from ortlaunch.ort.module import install

    # The corrections replace the same function, and do so once.
    install.install()
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    calls = []
    original = TrainingManager.execution_session_run_forward

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(TrainingManager, "execution_session_run_forward", staticmethod(counted))
    return calls


def batch(rows: int = 5) -> Tensor:
    return torch.randn(rows, 6)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_alike(eager: nn.Module, ort: nn.Module, *args: Any, used: tuple[int, ...] = (0, 1), **kwargs: Any) -> None:
    """Outputs and gradients of a step whose loss depends on some of the outputs."""
    args = args or (batch(),)
    for model in (eager, ort):
        model.zero_grad()
    expected, actual = eager(*args, **kwargs), ort(*args, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for outputs in (expected, actual):
        sum(outputs[place].square().sum() for place in used).backward()
    torch.testing.assert_close(gradients(ort), gradients(eager), rtol=1e-4, atol=1e-4)


def test_ortmodule_hands_the_parameters_over_in_the_first_step_alone(handed_over: list[int], twins) -> None:
    assert len(handed_over) == 1
    for rows in (5, 5, 3, 5):
        assert_alike(*twins, batch(rows))
    assert len(handed_over) == 1
    for model in twins:
        model.get_parameter("first.weight").requires_grad_(False)
    for _ in range(3):
        assert_alike(*twins)
    assert len(handed_over) == 2


def test_what_was_handed_over_is_used_again(twins) -> None:
    steps = session.training_manager(twins[1])._ortlaunch_steps
    for rows in (5, 5, 3, 5, 3):
        assert_alike(*twins, batch(rows))
    assert [len(free) for free in steps._free.values()] == [1, 1]
    # Two forwards at once need two.
    losses = [twins[1](batch())[1].sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert [len(free) for free in steps._free.values()] == [2, 1]
    assert_alike(*twins, batch(50_000))
    assert len(steps._free) == 2


@pytest.mark.parametrize("way", ["new memory", "transposed", "in place", "other sizes and back"])
def test_a_weights_memory_that_is_another_one(twins, way: str) -> None:
    values = 0.3 * torch.randn(6, 6)
    for model in twins:
        weight = model.get_parameter("first.weight")
        match way:
            case "new memory":
                weight.data = values.clone()
            case "transposed":
                # Type, sizes and address stay.
                weight.data = weight.data.t()
            case "in place":
                with torch.no_grad():
                    weight.copy_(values)
            case _:
                weight.data = torch.zeros(0)
                weight.data = values.clone()
    for _ in range(3):
        assert_alike(*twins)


def test_a_weights_old_memory_is_free_after_the_next_step(twins) -> None:
    weight = twins[1].get_parameter("first.weight")
    array = np.ones((6, 6), dtype=np.float32)
    old = weakref.ref(array)
    weight.data = torch.from_numpy(array)
    del array
    twins[1](batch())[1].sum().backward()
    assert old() is not None
    weight.data = torch.ones(6, 6)
    twins[1](batch())[1].sum().backward()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("rows", [3, 50_000])
def test_forwards_before_their_backwards(twins, rows: int) -> None:
    """Each keeps its own batch; the second size is one that is not copied."""
    batches = [batch(rows) for _ in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        for model in twins:
            model.zero_grad()
            losses = [model(x)[1].square().mean() for x in batches]
            # A forward without a backward holds nothing up.
            model(batches[0])
            for place in order:
                losses[place].backward()
        torch.testing.assert_close(gradients(twins[1]), gradients(twins[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_outputs_without_a_gradient(twins, used: tuple[int, ...]) -> None:
    for _ in range(2):
        assert_alike(*twins, used=used)


def test_arguments_of_other_kinds(wrap: Wrap) -> None:
    torch.manual_seed(0)
    eager = Net()
    ort = wrap(copy.deepcopy(eager))
    x = batch(4).requires_grad_()
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((batch(), torch.rand(5, 6) > 0.5), {}),
        ((batch(), torch.rand(5, 6) > 0.5), {}),
        ((batch(), None), {}),
        ((batch(),), {"kept": torch.rand(5, 6) > 0.2}),
        ((x,), {}),
        ((batch(6).t(),), {}),
        ((batch(),), {"factor": 3.0}),
    ]
    for args, kwargs in ways:
        for _ in range(2):
            assert_alike(eager, ort, *args, **kwargs)
    of_ort, of_eager = (torch.autograd.grad(model(x)[1].sum(), x)[0] for model in (ort, eager))
    torch.testing.assert_close(of_ort, of_eager)


def test_a_second_backward_is_an_error(twins) -> None:
    loss = twins[1](batch())[1].sum()
    loss.backward()
    with pytest.raises((AttributeError, RuntimeError)):
        loss.backward()
    assert_alike(*twins)


def test_a_closed_session_takes_no_step(twins) -> None:
    session.close(twins[1])
    assert not session.is_active(twins[1])
    manager = session.training_manager(twins[1])
    assert manager._ortlaunch_steps.take((batch(),), {}) is None
