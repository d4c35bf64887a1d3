"""Samples a machine and its GPUs in a thread while the training runs.

The first worker of each machine samples the machine, and every worker samples its own GPU. The means since the last log
step are sent to rank 0 with the figures that are gathered there anyway.
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
_MOST_SHARE = 0.005
"""Largest share of the thread's time in which it samples: a kernel without lists of children makes a sample slow."""
_LEAST_SECONDS = 0.25
"""Shortest time between two samples, because the kernel's counters have a resolution of 10 ms."""
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
"""MLflow's names of a machine's figures."""

WIDTH = len(NODE_FIELDS) + len(GPU_FIELDS)
_NOTHING = float("nan")


class Sampler:
    """Samples the machine, this worker's GPU, both or neither."""

    def __init__(
        self,
        roots: Sequence[int] | None,
        gpu: Gpu | None = None,
        now: Callable[[], float] = time.monotonic,
        usage: Callable[[list[int]], Usage] = read_usage,
    ) -> None:
        """
        Args:
            roots: processes that belong to the run on this machine with all of their descendants; None if another
                worker samples the machine.
            gpu: this worker's GPU; None if it has none or NVML does not report it.
            now: a clock in seconds; replaced in tests.
            usage: reads the processors' counters; replaced in tests.
        """
        self.throttled: bool | None = None
        """Whether any sample found the GPU's clocks lowered; None if the GPU does not report it."""
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
        """Starts to sample every few seconds, if there is anything to sample."""
        if self._roots is not None or self._gpu is not None:
            self._thread = threading.Thread(target=self._work, name="ortlaunch-system", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the sampling."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def window(self, *, steady: bool, now: bool) -> list[float]:
        """Ends a window at a log step.

        Args:
            steady: whether the window counts for the summary.
            now: whether to take a sample at once, because the next window is of another kind or there is none.

        Returns:
            Means of the samples since the last log step, in the order of `NODE_FIELDS` and of a GPU's fields; NaN
            without a sample.
        """
        begins_now = self.sample() if now or not steady else False
        with self._lock:
            if steady:
                self._steady = _sum(self._steady, self._pending)
            else:
                # The current interval began inside this window.
                self._disturbed = not begins_now
            self._pending = Usage(0.0, 0.0, 0.0)
            samples, self._samples = self._samples, []
        return [_mean(values) for values in zip(*samples, strict=True)] if samples else [_NOTHING] * WIDTH

    def other_seconds(self) -> tuple[float, float]:
        """Returns the seconds that other processes used in the steady windows, and those available; 0 if not known."""
        with self._lock:
            return self._steady.other, self._steady.total

    def sample(self) -> bool:
        """Takes a sample unless the last one is too recent; returns whether it did."""
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
        pause = SAMPLE_SECONDS
        while not self._done.wait(pause):
            begun = time.thread_time()
            # A failed sample must not end the run.
            with suppress(Exception):
                self.sample()
            pause = max(SAMPLE_SECONDS, (time.thread_time() - begun) / _MOST_SHARE)

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
    """Returns the bytes received and sent since the machine was started."""
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
