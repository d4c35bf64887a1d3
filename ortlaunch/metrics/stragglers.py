"""Which worker the others wait for.

In synchronous training every worker's step takes as long as the slowest one's: the others wait in a collective. So each
worker measures what it does before it waits: getting a batch and the forward pass.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortlaunch.metrics.marks import Marks


class OwnTime:
    """A worker's own time in a window."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            device: where the steps run.
            now: seconds; replaced in tests.
        """
        self._marks = Marks(device, now)
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """What follows is this worker's own."""
        self._begun = self._marks.mark()

    def end(self) -> None:
        """From here on it may wait for others."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._marks.mark()))
            self._begun = None

    def read(self) -> float:
        """Seconds since the last call; on CUDA call it when the device has caught up."""
        pairs, self._pairs = self._pairs, []
        return sum((self._marks.seconds(*pair) for pair in pairs), 0.0)


def straggler_metrics(own_seconds: Sequence[float], step_seconds: Sequence[float]) -> dict[str, float]:
    """Who is slowest in a window and by how much, by MLflow metric name; nothing for a worker alone.

    Args:
        own_seconds: of each worker, its own time per step.
        step_seconds: of each worker, how long its steps took with waiting, on average.
    """
    longest = max(step_seconds, default=0.0)
    if len(own_seconds) < 2 or longest <= 0.0:
        return {}
    slowest = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = statistics.median([*own_seconds[:slowest], *own_seconds[slowest + 1 :]])
    return {
        "stragglers/slowest_rank": float(slowest),
        "stragglers/step_seconds_max": longest,
        "stragglers/spread_percent": 100.0 * (own_seconds[slowest] - others) / longest,
    }


class Tally:
    """Over the steady windows: whether it is always the same one."""

    def __init__(self) -> None:
        self._ranks: Counter[int] = Counter()
        self._spreads: list[float] = []

    def add(self, metrics: dict[str, float]) -> None:
        """Takes what `straggler_metrics` found in a window."""
        if "stragglers/slowest_rank" in metrics:
            self._ranks[int(metrics["stragglers/slowest_rank"])] += 1
            self._spreads.append(metrics["stragglers/spread_percent"])

    def straggler(self, least_windows: int = 5, least_percent: float = 20.0) -> tuple[int, float] | None:
        """The worker that holds the others up, and the median of its lead in percent of a step; None for nobody.

        Args:
            least_windows: with fewer windows nothing is said.
            least_percent: a smaller lead is nothing to speak of.
        """
        if len(self._spreads) < least_windows:
            return None
        (rank, windows), *_ = self._ranks.most_common(1)
        spread = statistics.median(self._spreads)
        return (rank, spread) if windows >= 0.8 * len(self._spreads) and spread >= least_percent else None
