"""The learning-rate schedules: the options of ``scheduler``, and the rate of each step.

The launcher reads the options, so torch is imported in functions alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import SchedulerConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


@option("scheduler")
@dataclass
class ConstantConfig(SchedulerConfig):
    """The learning rate stays at its peak."""

    name: str = "constant"

    def ratio(self, progress: float) -> float:
        return 1.0


@option("scheduler")
@dataclass
class LinearConfig(SchedulerConfig):
    """The learning rate falls linearly to `min_ratio` of its peak at the last step."""

    name: str = "linear"
    min_ratio: float = number(0.0, least=0.0, most=1.0)
    """Learning rate at the last step, as a share of its peak."""

    def ratio(self, progress: float) -> float:
        return self.min_ratio + (1.0 - self.min_ratio) * (1.0 - progress)


@option("scheduler")
@dataclass
class CosineConfig(SchedulerConfig):
    """The learning rate falls along half a cosine to `min_ratio` of its peak at the last step."""

    name: str = "cosine"
    min_ratio: float = number(0.1, least=0.0, most=1.0)
    """Learning rate at the last step, as a share of its peak."""

    def ratio(self, progress: float) -> float:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_ratio + (1.0 - self.min_ratio) * share


def build_scheduler(optimizer: Optimizer, cfg: SchedulerConfig, steps: int) -> LambdaLR:
    """The schedule over `steps` optimizer steps; call its `step` after each optimizer step."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda done: lr_ratio(cfg, done, steps))


def lr_ratio(cfg: SchedulerConfig, done: int, steps: int) -> float:
    """Fraction of the peak learning rate for the step after `done` finished steps.

    It rises linearly over the warm-up, from more than 0 at the first step; the decay ends with the last of `steps`.
    """
    if done < cfg.warmup_steps:
        return (done + 1) / (cfg.warmup_steps + 1)
    decay_steps = max(1, steps - 1 - cfg.warmup_steps)
    return cfg.ratio(min(1.0, (done - cfg.warmup_steps) / decay_steps))
