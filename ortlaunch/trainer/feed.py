"""Micro-batches on the device, copied ahead where that overlaps with computing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ortlaunch.data.loader import Loader
from ortlaunch.data.position import Position
from ortlaunch.models.task import Batch


@dataclass(frozen=True)
class Placed:
    """A batch on the CPU, and the place in the data after it."""

    batch: Batch
    position: Position


def placed(loader: Loader) -> Iterator[Placed]:
    """The loader's batches, each with the place after it, however far the loader is when it is used."""
    for batch in loader:
        yield Placed(batch, loader.position)


class Feed:
    """Takes batches from a loader to the device. On CUDA the next one is on its way while the step computes."""

    def __init__(self, batches: Iterator[Placed], device: torch.device) -> None:
        """
        Args:
            batches: endless; in page-locked memory where the device is CUDA.
            device: where they go.
        """
        self._batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: Placed | None = None
        self._position: Position | None = None
        self.waited = 0.0
        """Seconds spent waiting for the loader so far."""

    @property
    def position(self) -> Position:
        """The place in the data after the last batch that was given out; there must have been one."""
        assert self._position is not None
        return self._position

    def take(self) -> Batch:
        """The next batch, on the device."""
        ready, self._ready = self._ready, None
        if ready is None:
            ready = self._copied()
        batch, self._position = ready.batch, ready.position
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in batch.values():
                # Made on the other stream, whose allocator must not reuse it while this one reads it.
                tensor.record_stream(current)
        return batch

    def prefetch(self) -> None:
        """Starts the next batch on its way; to be called when the device has been given its work. Nothing on the CPU,
        where it would only be early."""
        if self._stream is not None and self._ready is None:
            self._ready = self._copied()

    def _copied(self) -> Placed:
        since = time.perf_counter()
        taken = next(self._batches)
        self.waited += time.perf_counter() - since
        with torch.cuda.stream(self._stream):
            batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in taken.batch.items()}
        return Placed(batch, taken.position)
