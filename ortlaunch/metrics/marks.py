"""Time marks of a worker's computation that do not make it wait.

On the CPU an operation has ended when its Python call returns. On CUDA it may not have: there a mark is an event in the
stream, and the time between two events is known once the device has reached the second one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Marks:
    """Makes marks and measures the time between two of them."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            device: the device of the training steps.
            now: a clock in seconds; replaced in tests.
        """
        self.on_cuda = device.type == "cuda"
        self._now = now

    def mark(self) -> Any:
        """Marks the current moment."""
        if not self.on_cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Returns the time from one mark to another; on CUDA the device must have reached the second one."""
        return float(first.elapsed_time(second) / 1000.0 if self.on_cuda else second - first)
