"""The executor of the graph's ATen nodes: our operators are called directly, the others by ORTModule's executor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ortlaunch.base.errors import TrainingError
from ortlaunch.ort import extension
from tests.ort.conftest import Wrap


class Net(nn.Module):
    """Linear layers, GELU and cross-entropy are our operators, and pooling is one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(6, 5)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = functional.gelu(self.norm(self.first(x)))
        logits = self.last(functional.adaptive_avg_pool1d(hidden, 6))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("rows", [1, 7])
def test_both_kinds_of_operators_in_one_graph(to_ort: Wrap, rows: int) -> None:
    torch.manual_seed(0)
    eager = Net()
    ort = to_ort(eager)
    for _ in range(2):
        batch = {"x": torch.randn(3, rows, 8), "labels": torch.randint(0, 5, (3, rows))}
        losses = [model(**batch) for model in (eager, ort)]
        for model, loss in zip((eager, ort), losses, strict=True):
            model.zero_grad()
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(ort.get_parameter(name).grad, parameter.grad, msg=name)


def test_an_operator_that_fails_is_named(to_ort: Wrap) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(self.layer(x), labels)

    ort = to_ort(Failing())
    x = torch.rand(4, 4)
    for _ in range(2):
        ort(x, torch.tensor([0, 1, 2, 0])).backward()
    with pytest.raises(TrainingError, match=r"cross_entropy.*Target 3 is out of bounds"):
        ort(x, torch.tensor([0, 1, 3, 0])).backward()
    ort(x, torch.tensor([0, 1, 2, 0])).backward()


def test_the_profiler_sees_our_operators(to_ort: Wrap) -> None:
    ort = to_ort(Net())
    batch = {"x": torch.randn(3, 4, 8), "labels": torch.randint(0, 5, (3, 4))}
    ort(**batch).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        ort(**batch).backward()
    seen = {event.key for event in profiled.key_averages()}
    assert {"ortlaunch::linear_bias_trained", "ortlaunch::linear_bias_trained_backward"} <= seen


def test_the_functions_of_the_compiled_module() -> None:
    kernels = extension.load_kernels()
    weight = torch.rand(2, 3)
    places = kernels.places((weight,))
    assert kernels.places((weight.view(2, 3),)) == places
    for other in (weight.view(3, 2), weight.view(torch.int32), weight.clone(), weight[:1]):
        assert kernels.places((other,)) != places
    for unfit in (weight.t(), weight.to("meta"), weight.to_sparse(), object()):
        assert kernels.places((weight, unfit)) is None
    assert kernels.trained((weight, copy.copy(weight).requires_grad_())) == b"\x00\x01"
    with pytest.raises(TypeError, match="tuple"):
        kernels.places([weight])


def test_entries_and_attributes_are_compared_one_by_one() -> None:
    kernels = extension.load_kernels()
    first, second = object(), object()
    tables = ({"a": first}, {}, {"b": second, "c": None})
    assert kernels.same_entries(tables, (first, second, None))
    for entries in ((first, second), (first, second, None, None), (second, first, None), (first, object(), None), ()):
        assert not kernels.same_entries(tables, entries)
    module = nn.Dropout(0.5)
    assert kernels.same_attributes(((module, ("p", "inplace"), (0.5, False)),))
    for values in ((0.25, False), (0.5, True)):
        assert not kernels.same_attributes(((module, ("p", "inplace"), values),))
    module.p = 1 / 2
    assert kernels.same_attributes(((module, ("p",), (0.5,)),))
    del module.p
    assert not kernels.same_attributes(((module, ("p",), (0.5,)),))
