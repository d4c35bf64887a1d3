"""What runs while a model is exported keeps the export from being stored, where the key does not cover it."""

from __future__ import annotations

import copy
import os
import random
import re
import time
import types
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ortlaunch.config.schema import OrtConfig
from ortlaunch.ort import session
from ortlaunch.ort.cache import key as export_key


class Net(torch.nn.Module):
    """Calls something that the key does not see, as the name of the test says."""

    def __init__(self, take: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.take(self.linear)


def origin_of(model: torch.nn.Module) -> str:
    """Exports a model; returns what became of the export."""
    ort = session.wrap(model, OrtConfig(), threads=1, onnx_dir=Path())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ort(torch.rand(2, 4)).sum().backward()
    (origin,) = session.export_origins(ort)
    return origin


OPEN = open

OUTSIDE: dict[str, Callable[[torch.nn.Module], Any]] = {
    "os._Environ": lambda _: float(os.environ.get("DRAWN", 1)),
    "_random.random": lambda _: random.random(),
    "time": lambda _: time.time() / time.time(),
    "io.open": lambda _: float(OPEN(__file__).fileno() > 0),
    "uuid": lambda _: float(uuid.uuid4().int > 0),
    "numpy.random": lambda _: float(numpy.random.rand()),
}


class Everything(frozenset[types.CodeType]):
    """Contains whatever it is asked for."""

    def __contains__(self, code: object) -> bool:
        return True


def described(codes: frozenset[types.CodeType]) -> Callable[..., export_key.ModelFacts]:
    """A description that refuses nothing, as if the key had overlooked what the forward does."""

    def describe_model(model: torch.nn.Module, *, is_exported: bool = False) -> export_key.ModelFacts:
        return export_key.ModelFacts({"modules": {}, "reached": {}}, codes)

    return describe_model


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_comes_from_outside_is_seen_where_it_is_called(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(export_key, "describe_model", described(Everything()))
    origin = origin_of(Net(OUTSIDE[what]))
    assert re.match(rf"not stored: it calls {what}\S*( at {__file__}:\d+)?, ", origin), origin


def test_code_that_the_key_does_not_describe_is_seen_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_key, "describe_model", described(frozenset()))
    assert f"it runs {__name__}.Net.forward ({__file__}:" in origin_of(Net(lambda _: 2.0))


UNSEEN: dict[str, Callable[[torch.nn.Module], Any]] = {
    "torch.tensor": lambda linear: torch.tensor(linear.weight).sum(),
    "torch.tensor of a list": lambda linear: torch.tensor([linear.weight.sum(), 1.0]).sum(),
    "torch.as_tensor": lambda linear: torch.as_tensor([linear.weight.sum(), 1.0]).sum(),
    "a copy": lambda linear: copy.deepcopy(linear.weight).detach().sum(),
    "numpy": lambda linear: torch.from_numpy(linear.weight.detach().numpy()).sum(),
    "a legacy constructor": lambda linear: torch.Tensor([linear.weight.sum(), 1.0]).sum(),
    "new_tensor": lambda linear: linear.weight.new_tensor([linear.weight.sum(), 1.0]).sum(),
}


@pytest.mark.parametrize("way", UNSEEN)
def test_weights_that_become_constants_of_the_graph_are_not_stored(way: str) -> None:
    assert "depends on a tensor's value" in origin_of(Net(UNSEEN[way]))
