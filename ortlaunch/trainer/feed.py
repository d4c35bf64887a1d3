"""Micro-batches on the device, copied ahead where that overlaps with computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ortlaunch.data.position import Position
from ortlaunch.trainer.task import Batch


class Feed:
    """Takes batches from a loader to the device. On CUDA the next one is on its way while the step computes."""

    def __init__(self, batches: Iterator[Batch], device: torch.device, where: Callable[[], Position]) -> None:
        """
        Args:
            batches: endless batches on the CPU; in page-locked memory where the device is CUDA.
            device: where they go.
            where: the loader's position.
        """
        self._batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: Batch | None = None
        self._where = where
        self._position = where()
        self.waited = 0.0
        """Seconds spent waiting for the loader so far."""

    @property
    def position(self) -> Position:
        """The place in the data after the last batch that was given out, however far the loader is."""
        return self._position

    def take(self) -> Batch:
        """The next batch, on the device."""
        batch, self._ready = self._ready, None
        if batch is None:
            batch = self._copied()
        # The loader is where this batch ended: the next one is not taken before `prefetch`.
        self._position = self._where()
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

    def _copied(self) -> Batch:
        since = time.perf_counter()
        batch = next(self._batches)
        self.waited += time.perf_counter() - since
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in batch.items()}
        with torch.cuda.stream(self._stream):
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
