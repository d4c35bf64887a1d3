"""Micro-batches on the device, copied ahead where that overlaps with computing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch

from ortlaunch.data.loader import Loader
from ortlaunch.data.position import Position
from ortlaunch.models.task import Batch


@dataclass(frozen=True)
class PositionedBatch:
    """A batch, and the position in the data after it."""

    batch: Batch
    position: Position


class Lookahead:
    """Iterates over a loader's batches; the next ones can be read before they are taken.

    Each batch comes with its own position, since the loader's position is that of the last batch read.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._read: deque[PositionedBatch] = deque()

    def peek(self, count: int) -> list[Batch]:
        """The next batches, on the CPU, which stay in the iterator; fewer than `count` if the loader has no more."""
        for batch in islice(self._loader, max(0, count - len(self._read))):
            self._read.append(PositionedBatch(batch, self._loader.position))
        return [one.batch for one in islice(self._read, count)]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PositionedBatch:
        if self._read:
            return self._read.popleft()
        batch = next(self._loader)
        return PositionedBatch(batch, self._loader.position)


class Feed:
    """Copies batches to the device. On CUDA the next batch is copied while the step computes."""

    def __init__(self, batches: Iterator[PositionedBatch], device: torch.device) -> None:
        """
        Args:
            batches: endless; in page-locked memory where the device is CUDA.
            device: where to copy them.
        """
        self._batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: PositionedBatch | None = None
        self._position: Position | None = None
        self.waited = 0.0
        """Seconds spent waiting for the loader so far."""

    @property
    def position(self) -> Position:
        """The position in the data after the last batch that `take` returned; there must have been one."""
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
                # The tensor was allocated on the other stream, which must not reuse its memory while this one reads it.
                tensor.record_stream(current)
        return batch

    def prefetch(self) -> None:
        """Starts to copy the next batch; to be called when the device has work. Does nothing on the CPU, where no copy
        overlaps with computing."""
        if self._stream is not None and self._ready is None:
            self._ready = self._copied()

    def _copied(self) -> PositionedBatch:
        since = time.perf_counter()
        taken = next(self._batches)
        self.waited += time.perf_counter() - since
        with torch.cuda.stream(self._stream):
            batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in taken.batch.items()}
        return PositionedBatch(batch, taken.position)
