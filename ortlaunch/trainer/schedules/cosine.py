"""A learning rate that falls along half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import SchedulerConfig


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
