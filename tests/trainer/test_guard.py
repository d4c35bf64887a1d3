"""Losses that are not finite never reach the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ortlaunch.trainer.guard import Guard


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def guard(request: pytest.FixtureRequest) -> Guard:
    """A guard as on the CPU, whose host looks at each number, and as on a GPU, where it must not."""
    guard = Guard(torch.device("cpu"))
    assert guard.reads_values
    guard.reads_values = request.param
    return guard


def backward(guard: Guard, value: float) -> float:
    weight = torch.ones((), requires_grad=True)
    guard.watch(weight * value).backward()
    assert weight.grad is not None
    return weight.grad.item()


def test_a_finite_loss_goes_through_with_its_exact_gradient(guard: Guard) -> None:
    assert backward(guard, 0.1) == torch.tensor(0.1).item()
    assert guard.read() == (0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_makes_all_gradients_nan_from_then_on(guard: Guard, value: float) -> None:
    guard.step = 4
    # The gradient of this loss is finite: nothing but the guard tells the other workers.
    weight = torch.ones((), requires_grad=True)
    guard.watch(weight * 2.0 + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan()
    guard.step = 5
    assert backward(guard, 1.0) != backward(guard, 1.0), "NaN differs from itself"
    assert guard.read() == (4, 0)


def test_gradients_that_are_not_finite_are_noted_with_their_first_step(guard: Guard) -> None:
    for step, finite in ((1, True), (2, False), (3, True), (4, False)):
        guard.step = step
        guard.check_gradients(torch.tensor(finite))
    assert guard.read() == (0, 2)
    assert backward(guard, 1.0) != backward(guard, 1.0)


def test_numbers_of_a_gpu_are_not_read(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one would wait for the device at each step."""
    loss, finite = torch.ones((), requires_grad=True) * 2.0, torch.tensor(True)
    read: list[str] = []

    def noted(name: str, usual: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def call(tensor: torch.Tensor) -> Any:
            read.append(name)
            return usual(tensor)

        return call

    for name in ("__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, noted(name, getattr(torch.Tensor, name)))
    guard.watch(loss)
    guard.check_gradients(finite)
    assert read == (["item", "__bool__"] if guard.reads_values else [])
