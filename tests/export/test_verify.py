"""What `ortlaunch export verify` makes of losses and weights that are no numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ortlaunch.export.verify import Verification, _compare_weights, _problems, _train


def trainer(losses: list[float]) -> Any:
    left = iter(losses)
    return SimpleNamespace(step=lambda batch: next(left))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_loss_that_is_no_number_is_a_difference_at_any_step(at: int) -> None:
    losses = [3.0, 2.0, 1.0]
    found = Verification()
    _train(found, trainer([*losses[:at], math.nan, *losses[at + 1 :]]), trainer(losses), cast(Any, [None] * 3))
    assert math.isnan(found.loss_difference)
    assert _problems(found, serves=True)[0] == "losses differ by nan"


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_that_is_no_number_is_a_difference_whatever_follows_it(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    values = {key: tensor.detach().numpy().copy() for key, tensor in model.named_parameters()}
    values[name] = np.full_like(values[name], math.nan)
    found = Verification()
    _compare_weights(found, values, cast(Any, SimpleNamespace(model=model, chance=dict)))
    assert math.isnan(found.weight_difference) and found.weight == name
    assert any(problem == f"{name} differs by nan after the training" for problem in _problems(found, serves=True))
