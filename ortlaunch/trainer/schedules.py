"""The learning-rate schedules: the options of ``scheduler``, and the rate of each step.

The launcher reads the options, so torch is imported in functions alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import check_arguments, load_target
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


@option("scheduler")
@dataclass
class WsdConfig(SchedulerConfig):
    """Warm-up, stable, decay: the learning rate stays at its peak and falls linearly at the end."""

    name: str = "wsd"
    decay_share: float = number(0.2, above=0.0, most=1.0)
    """Share of the steps after the warm-up in which the learning rate falls."""
    min_ratio: float = number(0.0, least=0.0, most=1.0)
    """Learning rate at the last step, as a share of its peak."""

    def ratio(self, progress: float) -> float:
        return self.min_ratio + (1.0 - self.min_ratio) * min(1.0, (1.0 - progress) / self.decay_share)


@option("scheduler")
@dataclass
class PolynomialConfig(SchedulerConfig):
    """The learning rate falls as a power of the share of steps that are left, to `min_ratio` of its peak."""

    name: str = "polynomial"
    power: float = number(2.0, above=0.0)
    """Exponent of the share of steps that are left; 1 is a straight line."""
    min_ratio: float = number(0.0, least=0.0, most=1.0)
    """Learning rate at the last step, as a share of its peak."""

    def ratio(self, progress: float) -> float:
        return self.min_ratio + (1.0 - self.min_ratio) * (1.0 - progress) ** self.power


@option("scheduler")
@dataclass
class InverseSqrtConfig(SchedulerConfig):
    """The learning rate falls as the inverse square root of the steps; it does not depend on the length of the run."""

    name: str = "inverse_sqrt"
    timescale: int | None = number(None, least=1)
    """Steps from the peak until three times as many have halved the learning rate; null takes `warmup_steps`, or 10000
    without a warm-up."""

    def factor(self, done: int, total: int) -> float:
        if done < self.warmup_steps:
            return super().factor(done, total)
        scale = self.timescale or self.warmup_steps or 10_000
        return math.sqrt(scale / (scale + done - self.warmup_steps))


@option("scheduler")
@dataclass
class ScheduleFactoryConfig(SchedulerConfig):
    """A function of your own."""

    name: str = "factory"
    target: str | None = None
    """`package.module:function`, from the number of finished steps and that of all steps to the learning rate as a
    share of its peak. A warm-up multiplies it."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function by name."""

    @cached_property
    def _function(self) -> Callable[..., Any]:
        where = f"scheduler.target={self.target}"
        function = load_target(str(self.target), where)
        check_arguments(function, self.params, str(self.target), "scheduler.params", positional=2)
        return function

    def factor(self, done: int, total: int) -> float:
        rise = min(1.0, (done + 1) / (self.warmup_steps + 1))
        given = self._function(done, total, **self.params)
        try:
            factor = float(given)
        except (TypeError, ValueError):
            factor = math.nan
        if not 0 <= factor < math.inf:
            raise RequestError(
                f"scheduler.target={self.target} returned {given!r} for step {done} of {total}: return a factor of the "
                "learning rate, a number that is not negative"
            )
        return rise * factor


def build_scheduler(optimizer: Optimizer, cfg: SchedulerConfig, steps: int) -> LambdaLR:
    """The schedule over `steps` optimizer steps; call its `step` after each optimizer step.

    Raises:
        RequestError: a function of the user's is none, or returns no factor for the first or the last step.
    """
    from torch.optim.lr_scheduler import LambdaLR

    cfg.factor(steps - 1, steps)
    # torch asks for the rate after the last step, too.
    return LambdaLR(optimizer, lambda done: cfg.factor(min(done, steps - 1), steps))


def rate_of(optimizer: Optimizer, scheduler: LambdaLR | None, peak: float) -> float:
    """The learning rate of the next step.

    Args:
        optimizer: the optimizer.
        scheduler: its schedule; None where a script changes the rate itself.
        peak: the rate that the schedule multiplies.
    """
    if scheduler is None:
        return float(optimizer.param_groups[0]["lr"])
    return peak * float(scheduler.lr_lambdas[0](scheduler.last_epoch))
