"""A straight line."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.config.options import option
from ortlaunch.config.schema import SchedulerConfig


@option("scheduler")
@dataclass
class LinearConfig(SchedulerConfig):
    """Falls in a straight line to `min_ratio` of the peak at the last step."""

    name: str = "linear"
    min_ratio: float = 0.0
    """What is left of the peak at the last step."""

    def ratio(self, progress: float) -> float:
        return self.min_ratio + (1.0 - self.min_ratio) * (1.0 - progress)
