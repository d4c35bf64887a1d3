"""Moments of a worker's computation, without making it wait.

On the CPU an operation has ended when Python comes back from it. On CUDA it has not: there an event is recorded in the
stream, and the time between two is known when the device has come to the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Marks:
    """Makes marks and tells the time between two of them."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            device: where the steps run.
            now: seconds; replaced in tests.
        """
        self.on_cuda = device.type == "cuda"
        self._now = now

    def mark(self) -> Any:
        """This moment."""
        if not self.on_cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """From one mark to another; on CUDA call it when the device has caught up with the second."""
        return float(first.elapsed_time(second) / 1000.0 if self.on_cuda else second - first)
