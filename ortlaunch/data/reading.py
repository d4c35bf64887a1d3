"""How samples are read and made into batches, in the worker or in a loader process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ortlaunch.base.errors import RequestError
from ortlaunch.base.own_code import place_of
from ortlaunch.data.batch import Batch, UnlikeError, digest, mapped
from ortlaunch.data.position import Position
from ortlaunch.data.source import Share, Source, mix

_LISTED = 8
"""Numbers of samples that a message lists."""


@dataclass(frozen=True)
class Chosen:
    """The samples of a batch by their numbers."""

    numbers: list[int]
    everyone: int
    """The samples of all workers' batches together."""
    counts: bool = True
    """False for a repeat, by which a worker without a further sample keeps up with the others."""
    seed: int = 0
    """Of the random numbers that are drawn while the samples are read: of the batch, or of the epoch where each sample
    has a seed of its own."""


@dataclass(frozen=True)
class Read:
    """The samples of a batch."""

    samples: list[Any]
    numbers: list[int]
    counts: bool = True
    everyone: int | None = None
    """As `Chosen.everyone`; None where a worker knows its own samples alone."""
    process: int = 0
    """The loader process that has read them."""
    state: Any = None
    """Of a stream that has a state: where it goes on after them."""
    is_first: bool = False
    """Whether they are a stream's first ones in this process."""
    seed: int = 0
    """Of the random numbers that are drawn while they are made into a batch."""


@dataclass
class Loaded:
    """A batch, and what the worker has to know of it."""

    batch: Batch
    samples: int
    """How many count; 0 for a repeat."""
    everyone: int | None
    process: int
    state: Any
    digest: str | None
    """Of a stream's first batch in a loader process."""

    def pin_memory(self) -> Loaded:
        """Puts the tensors into page-locked memory; a loader calls it."""
        self.batch = mapped(self.batch, torch.Tensor.pin_memory)
        return self


class Numbered(Dataset[Any]):
    """A data set whose samples have numbers, read a batch at a time."""

    def __init__(self, source: Source) -> None:
        self._data: Any = source.dataset
        self._origin = source.origin
        self._is_own = source.is_own
        self._draws = source.draws

    def __getitems__(self, chosen: Chosen) -> Read:
        # Samples that are drawn, as by augmentation, are the same after a resume and with other loader processes.
        with seeded(chosen.seed) if self._is_own else nullcontext():
            samples = self._samples(chosen.numbers, chosen.seed)
        return Read(samples, chosen.numbers, chosen.counts, chosen.everyone, seed=mix(chosen.seed, chosen.numbers[0]))

    def _samples(self, numbers: list[int], seed: int) -> list[Any]:
        at_once = getattr(self._data, "__getitems__", None)
        if callable(at_once):
            with explained(f"reading the samples {_listed(numbers)} of {self._origin}"):
                return list(at_once(numbers))
        samples = []
        for number in numbers:
            own_seed = seeded(mix(seed, number)) if self._draws else nullcontext()
            with explained(f"reading sample {number} of {self._origin}"), own_seed:
                samples.append(self._data[number])
        return samples


class Stream(IterableDataset[Any]):
    """The batches of a stream: of this worker's part, or of its share of a stream that all workers read whole.

    Each iteration is an epoch. A stream that is shared out is taken in the order of its samples, whatever the number of
    workers and of loader processes: each takes every n-th sample, and each process every n-th batch.
    """

    def __init__(self, source: Source, share: Share, batch_size: int, start: Position, *, drop_last: bool) -> None:
        self._stream: Any = source.dataset
        self._origin = source.origin
        self._is_divided = source.is_divided
        self._share = share
        self._batch_size = batch_size
        self._start = start
        self._drop_last = drop_last
        self._epochs = count(start.epoch)

    def __iter__(self) -> Iterator[Read]:
        # Each loader process counts its own epochs: it has a copy of this object and starts each epoch once.
        epoch = next(self._epochs)
        start = self._start if epoch == self._start.epoch else Position(epoch)
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)
        with explained(f"reading {self._origin}"):
            yield from self._divided(start) if self._is_divided else self._own(start)

    def _divided(self, start: Position) -> Iterator[Read]:
        info = get_worker_info()
        process, processes = (info.id, info.num_workers) if info is not None else (0, 1)
        rank, world_size = self._share.rank, self._share.world_size
        numbered = islice(enumerate(self._stream), start.samples, None)
        for place, row in enumerate(self._rows(numbered, self._batch_size * world_size)):
            if place % processes == process:
                numbers, samples = zip(*(row[rank::world_size] or row[:1]), strict=True)
                yield Read(list(samples), list(numbers), rank < len(row), len(row), process)

    def _own(self, start: Position) -> Iterator[Read]:
        info = get_worker_info()
        process = info.id if info is not None else 0
        keeps_state = has_state(self._stream)
        if process < start.process:
            # A loader asks its processes in turn, from the first one on.
            yield Read([], [])
        if process < len(start.states) and start.states[process] is not None:
            self._stream.load_state_dict(start.states[process])
        taken = 0
        for samples in self._rows(iter(self._stream), self._batch_size):
            numbers = list(range(taken, taken + len(samples)))
            state = self._stream.state_dict() if keeps_state else None
            if not taken:
                check_state(state, self._origin)
            yield Read(samples, numbers, process=process, state=state, is_first=not taken)
            taken += len(samples)

    def _rows(self, samples: Iterator[Any], size: int) -> Iterator[list[Any]]:
        while row := list(islice(samples, size)):
            if len(row) < size and self._drop_last:
                return
            yield row


@dataclass(frozen=True)
class Collating:
    """Makes batches of what was read."""

    collate: Callable[[list[Any]], Batch]
    origin: str
    compares: bool = False
    """Whether the first batches of a stream are compared between processes and workers."""
    mixing: Callable[[Batch], Batch] | None = None
    """As of a source; None for batches of an evaluation."""

    def __call__(self, read: Read) -> Loaded | None:
        """Collates the samples; None for none.

        Raises:
            RequestError: the user's collate fails, or the samples differ.
        """
        if not read.samples:
            return None
        batch = self.batch(read.samples, read.numbers)
        if self.mixing is not None:
            with seeded(read.seed):
                batch = self.mixing(batch)
        content = digest(batch) if self.compares and read.is_first else None
        number = len(read.samples) if read.counts else 0
        return Loaded(batch, number, read.everyone, read.process, read.state, content)

    def batch(self, samples: list[Any], numbers: list[int]) -> Batch:
        """The batch of samples with these numbers; the errors are those of a call."""
        try:
            with explained(f"collating the samples {_listed(numbers)} of {self.origin}"):
                return self.collate(samples)
        except UnlikeError as error:
            raise RequestError(
                f"{self.origin}, sample {numbers[error.place]}: {error}; give samples of one form and size, or a "
                "collate that pads them"
            ) from error


def has_state(stream: Any) -> bool:
    """Whether a stream says where it is, and goes on from there."""
    return all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))


def check_state(state: Any, origin: str) -> None:
    """Refuses a state of the user's that no checkpoint can hold.

    Raises:
        RequestError: with what it may hold.
    """
    file = BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise RequestError(
            f"{origin}: its state_dict holds what a checkpoint cannot: let it have numbers, texts, "
            f"lists, dicts and tensors alone ({said})"
        ) from error


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns an error of the user's code into one that names its place; troubles of the machine stay what they are."""
    try:
        yield
    except (RequestError, UnlikeError, MemoryError):
        raise
    except Exception as error:
        place = place_of(error)
        # A file system that fails for a while is no fault of the request.
        if not place or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            raise
        said = " ".join(str(error).split())
        raise RequestError(f"{doing} failed: {type(error).__name__}: {said} ({place})") from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python, NumPy and torch draw numbers of a seed, and go on as before afterwards."""
    python, array, own = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.random.set_rng_state(own)


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_LISTED]))
    return shown if len(numbers) <= _LISTED else f"{shown}, …"
