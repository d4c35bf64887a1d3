"""Micro-batches on the device, copied ahead where that overlaps with computing, and their weights in the step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import torch
import torch.distributed as dist

from ortlaunch.data.batch import Batch, moved, named
from ortlaunch.data.loader import Loader
from ortlaunch.data.position import Position
from ortlaunch.models.items import Items, items_of, samples


@dataclass(frozen=True)
class PositionedBatch:
    """A batch, and the position in the data after it."""

    batch: Batch
    position: Position
    samples: int
    """How many of its samples count."""
    everyone: int | None
    """Those of all workers' batches at this place; None where a worker does not know."""


@dataclass(frozen=True)
class Micro:
    """A micro-batch of a step, on the device."""

    batch: Batch
    index: int
    """Its number in the step, counted from 0."""
    last: bool
    """Whether the optimizer's step follows."""
    weight: Callable[[], float | None]
    """As `Feed.weight`."""


class Lookahead:
    """Iterates over a loader's batches; the next ones can be read before they are taken.

    Each batch comes with its own position, since the loader's position is that of the last batch read.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._read: deque[PositionedBatch] = deque()

    def peek(self, count: int) -> list[Batch]:
        """The next batches, on the CPU, which stay in the iterator; fewer than `count` if the loader has no more."""
        for batch in islice(self.loader, max(0, count - len(self._read))):
            self._read.append(self._positioned(batch))
        return [one.batch for one in islice(self._read, count)]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PositionedBatch:
        if self._read:
            return self._read.popleft()
        return self._positioned(next(self.loader))

    def _positioned(self, batch: Batch) -> PositionedBatch:
        return PositionedBatch(batch, self.loader.position, self.loader.counted, self.loader.everyone)


class Weights:
    """How much each micro-batch of a step weighs: its items over the mean number of items of all micro-batches."""

    def __init__(self, items: Items, group: dist.ProcessGroup | None) -> None:
        """
        Args:
            items: what the loss of a micro-batch is a mean over.
            group: all workers, on the CPU, for nothing else; None for a single worker.
        """
        self._items = items
        self._group = group
        self._counts: deque[int] = deque()
        self._total = torch.zeros(2)
        self._exchange: dist.Work | None = None

    def begin_step(self, batches: list[PositionedBatch]) -> None:
        """Begins to sum the items of this step's micro-batches on all workers, all of which call it."""
        self._counts = deque(items_of(self._items, one.batch, one.samples) for one in batches)
        everyone = [one.everyone for one in batches if one.everyone is not None]
        if self._items is samples and len(everyone) == len(batches):
            # Each worker knows the others' samples.
            workers = 1 if self._group is None else self._group.size()
            self._total = torch.tensor([sum(everyone), len(batches) * workers], dtype=torch.float64)
            return
        self._total = torch.tensor([float(sum(self._counts)), float(len(batches))], dtype=torch.float64)
        if self._group is not None:
            self._exchange = dist.all_reduce(self._total, group=self._group, async_op=True)

    def take(self) -> float:
        """The weight of the step's next micro-batch; the mean of all of them is 1, or 0 in a step without items."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        items, batches = self._total.tolist()
        return self._counts.popleft() * batches / items if items else 0.0


class Feed:
    """Copies batches to the device. On CUDA the next batch is copied while the step computes."""

    def __init__(
        self, batches: Iterator[PositionedBatch], device: torch.device, weights: Weights | None = None
    ) -> None:
        """
        Args:
            batches: endless; in page-locked memory where the device is CUDA.
            device: where to copy them.
            weights: weighs the micro-batches of a step; None where all weigh the same.
        """
        self._batches = batches
        self._read: deque[PositionedBatch] = deque()
        self._weights = weights
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: PositionedBatch | None = None
        self._position: Position | None = None
        self.samples = 0
        """How many samples of the batch that `take` returned last count."""
        self.waited = 0.0
        """Seconds spent waiting for the loader so far."""

    @property
    def position(self) -> Position:
        """The position in the data after the last batch that `take` returned; there must have been one."""
        assert self._position is not None
        return self._position

    def begin_step(self, count: int) -> None:
        """Reads this step's `count` micro-batches ahead, where they are weighed. All workers call it."""
        if self._weights is not None:
            # On CUDA the first one may have been copied already.
            held = [] if self._ready is None else [self._ready]
            self._read.extend(self._next() for _ in range(count - len(held)))
            self._weights.begin_step([*held, *self._read])

    def weight(self) -> float | None:
        """The weight of the loss of the batch that `take` returned last; None where all weigh the same.

        It may wait for the other workers, and is to be asked once for each batch.
        """
        return None if self._weights is None else self._weights.take()

    def take(self) -> Batch:
        """The next batch, on the device."""
        ready, self._ready = self._ready, None
        if ready is None:
            ready = self._copied()
        batch, self._position, self.samples = ready.batch, ready.position, ready.samples
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in named(batch).values():
                # The tensor was allocated on the other stream, which must not reuse its memory while this one reads it.
                tensor.record_stream(current)
        return batch

    def prefetch(self) -> None:
        """Starts to copy the next batch; to be called when the device has work. Does nothing on the CPU, where no copy
        overlaps with computing."""
        if self._stream is not None and self._ready is None:
            self._ready = self._copied()

    def _next(self) -> PositionedBatch:
        since = time.perf_counter()
        taken = next(self._batches)
        self.waited += time.perf_counter() - since
        return taken

    def _copied(self) -> PositionedBatch:
        taken = self._read.popleft() if self._read else self._next()
        with torch.cuda.stream(self._stream):
            return replace(taken, batch=moved(taken.batch, self._device, non_blocking=True))
