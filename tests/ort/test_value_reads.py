"""A decision on a tensor's value is told from one on its size."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from ortlaunch.ort.tracing import value_reads


def trace(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[value_reads.ValueRead]:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x) * self.weight

    with value_reads.watch() as reads, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(Model(), torch.rand(2, 3), check_trace=False)
    return reads


def on_sum(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def on_scalar(x: torch.Tensor) -> torch.Tensor:
    return x * x.mean().item()


def on_random(x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.5 else -x


def on_equality(x: torch.Tensor) -> torch.Tensor:
    return x if torch.equal(x, x + 1) else -x


def on_count_of_chosen(x: torch.Tensor) -> torch.Tensor:
    return x if x[x > 0.5].shape[0] > 2 else -x


def on_size(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 1 and (x.shape[1] * torch.ones(2)).sum() > 1:
        return x * int(x.shape[0] // 2)
    return -x


def on_size_of_slice(x: torch.Tensor) -> torch.Tensor:
    return x if x[:, torch.tensor([0, 1])].shape[0] > 1 else -x


@pytest.mark.parametrize("forward", [on_sum, on_scalar, on_random, on_equality, on_count_of_chosen])
def test_decisions_on_values_are_found_with_their_line(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    (read,) = trace(forward)
    assert read.file == __file__
    first = forward.__code__.co_firstlineno
    assert first < read.line <= first + 1


@pytest.mark.parametrize("forward", [on_size, on_size_of_slice])
def test_decisions_on_sizes_are_not(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert trace(forward) == []


def test_the_tracers_warning_still_names_the_models_line() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return on_sum(x)

    with value_reads.watch(), pytest.warns(torch.jit.TracerWarning) as heard:
        torch.jit.trace(Model(), torch.rand(2, 3), check_trace=False)
    (warning,) = [warning for warning in heard if issubclass(warning.category, torch.jit.TracerWarning)]
    assert (warning.filename, warning.lineno) == (__file__, on_sum.__code__.co_firstlineno + 1)


def test_afterwards_tensors_are_as_before() -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("__bool__", "item", "equal")}
    with value_reads.watch():
        assert torch.Tensor.item is not before["item"]
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert "item" not in vars(torch.Tensor)
