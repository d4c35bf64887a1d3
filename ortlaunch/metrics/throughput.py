"""Measures the speed of the training loop without making it wait.

The marks of a window's steps are read at the next log step, when the host waits for the device anyway.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ortlaunch.metrics.marks import Marks


class StepClock:
    """Measures the duration of each step."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            device: the device of the training steps.
            now: a clock in seconds; replaced in tests.
        """
        self._marks = Marks(device, now)
        # Each list has the marks of steps that followed each other without a pause.
        self._stretches: list[list[Any]] = [[self._marks.mark()]]

    def step_done(self) -> None:
        """Marks the end of a step."""
        self._stretches[-1].append(self._marks.mark())

    def read(self) -> list[float]:
        """Returns the seconds of each step since the last call; on CUDA call it when the device has caught up."""
        stretches, self._stretches = self._stretches, [self._stretches[-1][-1:]]
        if self._marks.on_cuda:
            stretches[-1][-1].synchronize()
        return [self._marks.seconds(*pair) for marks in stretches for pair in itertools.pairwise(marks)]

    def restart(self) -> None:
        """Begins the next step now, so that the time since the last step's end belongs to no step."""
        self._stretches.append([self._marks.mark()])


@dataclass
class Window:
    """What one worker processed between two log steps."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    data_wait_seconds: float = 0.0


def window_metrics(
    window: Window,
    step_seconds: list[float],
    *,
    world_size: int,
    flops_per_sample: float | None,
    peak_flops: float | None,
) -> dict[str, float]:
    """Computes the throughput of one window from the steps in it.

    Args:
        window: counts of this worker; they are the same for all workers.
        step_seconds: duration of each step in the window.
        world_size: number of workers.
        flops_per_sample: floating-point operations of forward and backward for one sample; None if not known.
        peak_flops: the device's peak in operations per second at this precision; None if not known.

    Returns:
        Values by MLflow metric name; token rates only if the data has tokens.
    """
    seconds = sum(step_seconds)
    if seconds <= 0 or window.steps == 0:
        return {}
    metrics = {
        "throughput/step_seconds": seconds / window.steps,
        "throughput/samples_per_second": window.samples * world_size / seconds,
        "throughput/data_wait_percent": 100.0 * window.data_wait_seconds / seconds,
    }
    if window.tokens:
        metrics["throughput/tokens_per_second"] = window.tokens * world_size / seconds
        metrics["throughput/device/tokens_per_second"] = window.tokens / seconds
    if flops_per_sample is not None:
        achieved = flops_per_sample * window.samples / seconds
        metrics["throughput/tflops_per_device"] = achieved / 1e12
        if peak_flops is not None:
            metrics["throughput/mfu_percent"] = 100.0 * achieved / peak_flops
    return metrics


@dataclass
class Steady:
    """The steps that count for a run's summary: all but warm-up."""

    seconds: list[float] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    windows: int = 0

    def add(self, window: Window, step_seconds: list[float]) -> None:
        """Adds a steady window."""
        self.seconds += step_seconds
        self.samples += window.samples
        self.tokens += window.tokens
        self.windows += 1

    def summary(self, world_size: int) -> dict[str, float]:
        """Returns medians and percentiles over the steps, by MLflow metric name; empty if no step was steady.

        The median rate is that of a step of average size with the median duration, over all workers.
        """
        if not self.seconds:
            return {}
        steps = len(self.seconds)
        median = statistics.median(self.seconds)
        metrics = {
            "summary/step_seconds_p50": median,
            "summary/step_seconds_p95": percentile(self.seconds, 95.0),
            "summary/steady_steps": float(steps),
            "summary/steady_windows": float(self.windows),
            "summary/samples_per_second_median": self.samples / steps * world_size / median,
        }
        if self.tokens:
            metrics["summary/tokens_per_second_median"] = self.tokens / steps * world_size / median
        return metrics


def percentile(values: list[float], percent: float) -> float:
    """Returns the value below which `percent` of the values are, interpolated linearly between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100.0
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
