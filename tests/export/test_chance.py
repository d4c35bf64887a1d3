"""Which weights `ortlaunch export verify` leaves to chance: AdamW makes full steps from the rounding of a gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ortlaunch.export.trainers import TorchTrainer
from ortlaunch.trainer.optimizers import AdamWConfig


@pytest.mark.parametrize(
    ("gradients", "is_chance"),
    [
        ([1e-8, 1e-8, 1e-8], True),
        # Its first step has been made by then.
        ([1e-8, 5e-4, 2e-2], True),
        ([0.0, 1e-8, 5e-4], True),
        ([5e-4, 1e-8, 1e-8], False),
        ([0.0, 5e-4, 0.0], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_a_weight_whose_first_gradient_is_rounding_is_left_to_chance(
    gradients: list[float], is_chance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    record = SimpleNamespace(trainable=["weight"], loss="own")
    trainer = TorchTrainer(model, cast(Any, record), AdamWConfig())
    monkeypatch.setattr(trainer, "loss", lambda batch: (model.weight[0] * batch).sum())
    for gradient in gradients:
        trainer.step(cast(Any, torch.tensor([gradient, 1.0])))
    assert trainer.chance()["weight"].tolist() == [[is_chance, False]]
