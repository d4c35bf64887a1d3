"""The learning rate of each step: a warm-up, then the shape of the chosen schedule."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from ortlaunch.config.schema import SchedulerConfig


def build_scheduler(optimizer: torch.optim.Optimizer, cfg: SchedulerConfig, steps: int) -> LambdaLR:
    """The schedule over `steps` optimizer steps; call its `step` after each optimizer step."""
    return LambdaLR(optimizer, lambda done: lr_ratio(cfg, done, steps))


def lr_ratio(cfg: SchedulerConfig, done: int, steps: int) -> float:
    """Fraction of the peak learning rate for the step after `done` finished steps.

    It rises linearly over the warm-up, from more than 0 at the first step; the decay ends with the last of `steps`.
    """
    if done < cfg.warmup_steps:
        return (done + 1) / (cfg.warmup_steps + 1)
    decay_steps = max(1, steps - 1 - cfg.warmup_steps)
    return cfg.ratio(min(1.0, (done - cfg.warmup_steps) / decay_steps))
