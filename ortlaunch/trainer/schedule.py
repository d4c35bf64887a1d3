"""The learning rate of each step: a warm-up, then the shape of the chosen schedule."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from ortlaunch.config.schema import SchedulerConfig


def build_scheduler(optimizer: torch.optim.Optimizer, cfg: SchedulerConfig, steps: int) -> LambdaLR:
    """The schedule over `steps` optimizer steps; its step is taken after each optimizer step."""
    return LambdaLR(optimizer, lambda done: lr_ratio(cfg, done, steps))


def lr_ratio(cfg: SchedulerConfig, done: int, steps: int) -> float:
    """Share of the peak learning rate that the step after `done` finished ones gets.

    Rises in a straight line over the warm-up, the first step taking one part of it and not nothing; the decay ends
    with the last of `steps`.
    """
    if done < cfg.warmup_steps:
        return (done + 1) / (cfg.warmup_steps + 1)
    decay_steps = max(1, steps - 1 - cfg.warmup_steps)
    return cfg.ratio(min(1.0, (done - cfg.warmup_steps) / decay_steps))
