"""Learning-rate schedules against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.config.schema import AdamWConfig, ConstantConfig, CosineConfig, LinearConfig, SchedulerConfig, SgdConfig
from ortlaunch.trainer.optim import build_optimizer, build_scheduler, lr_ratio


@pytest.mark.parametrize(
    ("cfg", "ratios"),
    [
        (ConstantConfig(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (ConstantConfig(warmup_steps=3), [0.25, 0.5, 0.75, 1.0, 1.0]),
        (LinearConfig(min_ratio=0.2), [1.0, 0.8, 0.6, 0.4, 0.2]),
        (LinearConfig(warmup_steps=1), [0.5, 1.0, 2 / 3, 1 / 3, 0.0]),
        (CosineConfig(min_ratio=0.0), [1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_a_schedule_over_five_steps(cfg: SchedulerConfig, ratios: list[float]) -> None:
    assert [lr_ratio(cfg, done, 5) for done in range(5)] == pytest.approx(ratios, abs=1e-6)


def test_the_schedule_multiplies_the_peak() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([weight], SgdConfig(lr=0.1))
    scheduler = build_scheduler(optimizer, LinearConfig(), steps=2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_frozen_parameters_are_left_out() -> None:
    frozen, free = torch.nn.Parameter(torch.ones(1), requires_grad=False), torch.nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([frozen, free], AdamWConfig())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [free]
