"""A constant learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.config.options import option
from ortlaunch.config.schema import SchedulerConfig


@option("scheduler")
@dataclass
class ConstantConfig(SchedulerConfig):
    """The learning rate stays at its peak."""

    name: str = "constant"

    def ratio(self, progress: float) -> float:
        return 1.0
