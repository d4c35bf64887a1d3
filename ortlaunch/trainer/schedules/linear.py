"""A learning rate that falls linearly."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import SchedulerConfig


@option("scheduler")
@dataclass
class LinearConfig(SchedulerConfig):
    """The learning rate falls linearly to `min_ratio` of its peak at the last step."""

    name: str = "linear"
    min_ratio: float = number(0.0, least=0.0, most=1.0)
    """Learning rate at the last step, as a share of its peak."""

    def ratio(self, progress: float) -> float:
        return self.min_ratio + (1.0 - self.min_ratio) * (1.0 - progress)
