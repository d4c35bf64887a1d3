"""Samples of a machine and its GPUs, taken by a thread beside the training.

On each machine the first worker looks at the machine, and every worker at its own GPU. What was seen since the last log
step travels to rank 0 with what is gathered there anyway.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from ortlaunch.metrics.gpu import FIELDS as GPU_FIELDS
from ortlaunch.metrics.gpu import Gpu
from ortlaunch.metrics.processes import Usage, read_usage

SAMPLE_SECONDS = 5.0
_LEAST_SECONDS = 0.25
"""Between two samples: the kernel's counters move in hundredths of a second."""
_MEGABYTE = 1e6

NODE_FIELDS = (
    "cpu_utilization_percentage",
    "system_memory_usage_percentage",
    "system_memory_usage_megabytes",
    "network_receive_megabytes",
    "network_transmit_megabytes",
    "disk_usage_percentage",
    "disk_available_megabytes",
)
"""MLflow's names of what is measured of a machine."""

WIDTH = len(NODE_FIELDS) + len(GPU_FIELDS)
_NOTHING = float("nan")


class Sampler:
    """Looks at the machine, at this worker's GPU, at both or at neither."""

    def __init__(
        self,
        roots: Sequence[int] | None,
        gpu: Gpu | None = None,
        now: Callable[[], float] = time.monotonic,
        usage: Callable[[list[int]], Usage] = read_usage,
    ) -> None:
        """
        Args:
            roots: processes that, with all below them, are the run's own on this machine; None where another worker
                looks at the machine.
            gpu: this worker's; None without one, or where NVML does not tell.
            now: seconds; replaced in tests.
            usage: reads the processors' counters; replaced in tests.
        """
        self.throttled: bool | None = None
        """Whether some sample found the GPU's clocks held down; None where that cannot be known."""
        self._roots = None if roots is None else list(roots)
        self._gpu = gpu
        self._now = now
        self._read_usage = usage
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._network = _network()
        self._samples: list[list[float]] = []
        self._pending = Usage(0.0, 0.0, 0.0)
        self._steady = Usage(0.0, 0.0, 0.0)
        self._disturbed = False
        self._last: tuple[float, Usage | None] = (now(), self._usage())

    def start(self) -> None:
        """Begins to sample every few seconds, where there is something to look at."""
        if self._roots is not None or self._gpu is not None:
            self._thread = threading.Thread(target=self._work, name="ortlaunch-system", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def window(self, *, steady: bool, now: bool) -> list[float]:
        """A log step ends a window.

        Args:
            steady: whether the window counts for the summary.
            now: take a sample at once, for a window after which the next one will be of another kind, or none will be.

        Returns:
            Means of what was sampled since the last log step, in the order of `NODE_FIELDS` and of a GPU's fields; NaN
            for what was not sampled.
        """
        begins_now = self.sample() if now or not steady else False
        with self._lock:
            if steady:
                self._steady = _sum(self._steady, self._pending)
            else:
                # The interval that goes on reaches back into the window.
                self._disturbed = not begins_now
            self._pending = Usage(0.0, 0.0, 0.0)
            samples, self._samples = self._samples, []
        return [_mean(values) for values in zip(*samples, strict=True)] if samples else [_NOTHING] * WIDTH

    def other_seconds(self) -> tuple[float, float]:
        """Processor seconds that others used in the steady windows, and that there were; zeros where unknown."""
        with self._lock:
            return self._steady.other, self._steady.total

    def sample(self) -> bool:
        """Takes a sample, unless the last one was taken just now; returns whether it did."""
        with self._lock:
            at, before = self._last
            if self._now() - at < _LEAST_SECONDS:
                return False
            usage = self._usage()
            self._last = (self._now(), usage)
            spent = usage.since(before) if usage is not None and before is not None else None
            if spent is not None and not self._disturbed:
                self._pending = _sum(self._pending, spent)
            self._disturbed = False
            self._samples.append([*self._node(spent), *self._device()])
            return True

    def _work(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            # Figures are no reason to end a run.
            with suppress(Exception):
                self.sample()

    def _usage(self) -> Usage | None:
        if self._roots is None:
            return None
        try:
            return self._read_usage(self._roots)
        except (OSError, ValueError):
            return None

    def _node(self, spent: Usage | None) -> list[float]:
        values = [_NOTHING] * len(NODE_FIELDS)
        if self._roots is None:
            return values
        if spent is not None:
            values[0] = spent.busy_percent
        with suppress(OSError, psutil.Error):
            memory = psutil.virtual_memory()
            values[1] = memory.percent
            values[2] = memory.used / _MEGABYTE
        if (network := _network()) is not None and self._network is not None:
            values[3] = (network[0] - self._network[0]) / _MEGABYTE
            values[4] = (network[1] - self._network[1]) / _MEGABYTE
        with suppress(OSError):
            disk = shutil.disk_usage("/")
            values[5] = 100.0 * disk.used / disk.total
            values[6] = disk.free / _MEGABYTE
        return values

    def _device(self) -> list[float]:
        if self._gpu is None:
            return [_NOTHING] * len(GPU_FIELDS)
        slowed = self._gpu.is_slowed()
        if slowed is not None:
            self.throttled = bool(self.throttled) or slowed
        return self._gpu.read()


def _network() -> tuple[int, int] | None:
    """Bytes received and sent since the machine was started."""
    try:
        counters = psutil.net_io_counters()
    except (OSError, psutil.Error, ValueError):
        return None
    return (counters.bytes_recv, counters.bytes_sent) if counters is not None else None


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(one.total + other.total, one.busy + other.busy, one.own + other.own)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else _NOTHING
