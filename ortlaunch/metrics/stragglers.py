"""Finds the worker that the others wait for.

In synchronous training every step takes as long as the slowest worker's, because the others wait in a collective. So
each worker measures the time that it needs before it waits: loading a batch and the forward pass.
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
    """Measures a worker's own time in a window."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            device: the device of the training steps.
            now: a clock in seconds; replaced in tests.
        """
        self._marks = Marks(device, now)
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Starts the measurement: what follows is this worker's own work."""
        self._begun = self._marks.mark()

    def end(self) -> None:
        """Ends the measurement: from here on the worker may wait for others."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._marks.mark()))
            self._begun = None

    def read(self) -> float:
        """Returns the seconds since the last call; on CUDA call it when the device has caught up."""
        pairs, self._pairs = self._pairs, []
        return sum((self._marks.seconds(*pair) for pair in pairs), 0.0)


def straggler_metrics(own_seconds: Sequence[float], step_seconds: Sequence[float]) -> dict[str, float]:
    """Returns the slowest worker of a window and its lag, by MLflow metric name; nothing for a single worker.

    Args:
        own_seconds: for each worker, its own time per step.
        step_seconds: for each worker, the mean duration of its steps, with waiting.
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
    """Collects the steady windows, to find a worker that is slowest in most of them."""

    def __init__(self) -> None:
        self._ranks: Counter[int] = Counter()
        self._spreads: list[float] = []

    def add(self, metrics: dict[str, float]) -> None:
        """Adds the result of `straggler_metrics` for a window."""
        if "stragglers/slowest_rank" in metrics:
            self._ranks[int(metrics["stragglers/slowest_rank"])] += 1
            self._spreads.append(metrics["stragglers/spread_percent"])

    def straggler(self, least_windows: int = 5, least_percent: float = 20.0) -> tuple[int, float] | None:
        """Returns the worker that the others wait for, and its median lag in percent of a step; None if there is none.

        Args:
            least_windows: with fewer windows there is no result.
            least_percent: a smaller lag is ignored.
        """
        if len(self._spreads) < least_windows:
            return None
        (rank, windows), *_ = self._ranks.most_common(1)
        spread = statistics.median(self._spreads)
        return (rank, spread) if windows >= 0.8 * len(self._spreads) and spread >= least_percent else None
