"""An endless iterator over the batches of one rank's share of a data source."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Sampler

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.base.sockets import socket_folder
from ortlaunch.base.text import counted
from ortlaunch.config.schema import DataConfig, TokenDataConfig
from ortlaunch.data.batch import Batch
from ortlaunch.data.holdout import HeldOut, held_out_batches, hold_out
from ortlaunch.data.position import Position
from ortlaunch.data.processes import signals_held, start_loader_process
from ortlaunch.data.reading import Chosen, Collating, Loaded, Numbered, Stream
from ortlaunch.data.source import Share, Source, check_seq_len, mix

_NO_SHARED_MEMORY = ("unable to resize file </torch_", "unable to allocate shared memory", "out of shared memory")
"""What torch says where a loader process finds no room for a batch, before it writes or when the kernel ends it."""
_FULL = (
    "/dev/shm, through which loader processes hand over batches, has no room for them: free some (in Docker give "
    "--shm-size=1g), lower train.batch_size, or read in the worker itself by data.workers=0"
)


class EndlessBatches(Sampler[Chosen]):
    """Yields the sample numbers of each batch, over all epochs.

    One iterator serves the whole run, so loader processes prefetch across the end of an epoch. The order of the samples
    depends only on seed and epoch. Worker r of n takes every n-th sample of it, beginning with the r-th. All workers
    together thus see the same samples for any n, and any number of workers can resume at any position.
    """

    def __init__(self, source: Source, share: Share, batch_size: int, start: Position, *, drop_last: bool) -> None:
        self._samples = source.samples or 0
        self._share = share
        self._batch_size = batch_size
        self._start = start
        self._drop_last = drop_last
        self._draws = source.is_own

    def __iter__(self) -> Iterator[Chosen]:
        samples_per_step = self._batch_size * self._share.world_size
        first = self._start.samples
        for epoch in count(self._start.epoch):
            generator = torch.Generator().manual_seed(mix(self._share.seed) + epoch)
            # A tensor, because a list of numbers takes eight times as much memory.
            left = torch.randperm(self._samples, generator=generator)[first:]
            if self._drop_last:
                left = left[: len(left) // samples_per_step * samples_per_step]
            for begin in range(0, len(left), samples_per_step):
                row = left[begin : begin + samples_per_step]
                mine = row[self._share.rank :: self._share.world_size]
                chosen = mine if len(mine) else row[:1]
                numbers = chosen.tolist()
                seed = mix(self._share.seed, epoch, numbers[0]) if self._draws else 0
                yield Chosen(numbers, len(row), len(mine) > 0, seed)
            first = 0


class Loader:
    """Iterates over batches without end. As a context manager, it closes itself at the end.

    Batches are {"input_ids": int64 [B, T], "labels": int64 [B, T]}, {"pixel_values": float32 [B, C, H, W],
    "labels": int64 [B]}, or of the user's own form. All ranks take the same number of batches per epoch. The rest of an
    epoch is dropped, or makes shorter batches; a rank for which nothing is left repeats a sample, which counts nowhere.
    The samples of a step over all ranks depend on the global batch size, but not on the number of ranks. Streams are
    the exception unless they are shared out: each rank has its own part, and its epochs end when its part ends.

    Attributes:
        kind: "tokens" or "images".
        vocab_size: the number of distinct token ids, where known.
        num_classes: the number of labels, for images.
        fingerprint: a short hash that identifies the data set.
        origin: the data as the user typed it.
        metrics: those of an evaluation where the request names none.
        notes: what the user should know of the data.
        labels_vary: whether samples may have other numbers of labels that count.
        samples: the training samples of one epoch over all workers, with the rest that is dropped; None for a stream.
        is_uneven: whether batches may have fewer samples than others, or none that count.
        is_numbered: whether a position is valid for any number of workers.
        batches_per_epoch: the batches that this rank takes per epoch; None for a stream.
        epoch: the epoch of the batch returned last, counted from 0.
        position: the position of the next batch, which `build_loader` takes as `start`.
        counted: how many samples of the batch returned last count.
        everyone: those of all workers' batches together; None where a worker does not know.
    """

    def __init__(
        self,
        source: Source,
        share: Share,
        *,
        batch_size: int,
        workers: int,
        pin_memory: bool,
        start: Position,
        drop_last: bool = True,
    ) -> None:
        self.kind = source.kind
        self.vocab_size = source.vocab_size
        self.num_classes = source.num_classes
        self.fingerprint = source.fingerprint
        self.origin = source.origin
        self.labels_vary = source.labels_vary
        self.metrics = source.metrics
        self.notes = source.notes
        self.samples = source.samples
        self._is_own = source.is_own
        self.is_uneven = not drop_last
        self.is_numbered = not source.is_stream or source.is_divided
        self.batches_per_epoch = _batches_per_epoch(source, share, batch_size, drop_last=drop_last)
        self.epoch = start.epoch
        self.position = start
        self.counted = 0
        self.everyone: int | None = None
        self._samples_per_step = batch_size * share.world_size
        self._batches_to_skip = 0 if start.states else start.batches
        self._states = dict(enumerate(start.states))
        self._too_small = _too_small(source, share, batch_size)
        self._loader = _data_loader(
            source,
            share,
            batch_size=batch_size,
            workers=workers,
            pin_memory=pin_memory,
            start=start,
            drop_last=drop_last,
        )
        self._iterator: Iterator[Loaded | None] | None = None
        self._ahead: deque[Loaded] = deque()
        self._closed = False
        self._sockets = ExitStack()
        self._source, self._share, self._batch_size = source, share, batch_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._begun()
        with _one_message():
            loaded = self._ahead.popleft() if self._ahead else self._next_batch()
        self._advance(loaded)
        return loaded.batch

    def start_processes(self) -> None:
        """Starts the loader processes, if there are any, before the first batch is asked for.

        They are forked, and keep what this process has in memory by then, also when it has changed or freed it.
        """
        if self._iterator is None and self._loader.num_workers:
            self._iterator = self._begun()

    def first_digests(self) -> list[str]:
        """Digests of the first batch of each loader process, which stay; empty for data that are shared out here."""
        if self.is_numbered or not self._is_own or self.position != Position():
            return []
        if self._iterator is None:
            self._iterator = self._begun()
        with _one_message():
            self._ahead.extend(one for one in islice(self._iterator, max(1, self._loader.num_workers)) if one)
        return [one.digest for one in self._ahead if one.digest is not None]

    @property
    def processes(self) -> list[int]:
        """The numbers of the loader processes that have been started."""
        return [process.pid for process in getattr(self._iterator, "_workers", ())]

    def held_out(self, samples: int) -> list[HeldOut]:
        """This rank's batches of an evaluation on `samples` held-out samples; see `held_out_batches`."""
        return held_out_batches(self._source, self._share, batch_size=self._batch_size, samples=samples)

    def first_samples(self, number: int) -> Batch | None:
        """The first samples of the data set in one batch, as its source makes one; None where there are not as many."""
        if self._source.is_stream or (self.samples or 0) < number:
            return None
        numbers = list(range(number))
        read = Numbered(self._source).__getitems__(Chosen(numbers, number))
        return Collating(self._source.collate, self.origin).batch(read.samples, numbers)

    def close(self) -> None:
        """Ends the loader processes and waits for them. No batches follow. A second call does nothing."""
        self._closed = True
        iterator = self._iterator
        self._iterator = None
        # torch ends the processes when the iterator is collected. A traceback that holds it can delay that for ever.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._sockets.close()

    def _begun(self) -> Iterator[Loaded | None]:
        if self._loader.num_workers:
            self._sockets.enter_context(socket_folder())
        try:
            with signals_held():
                return iter(self._loader)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # Their semaphores are there, too.
                raise TrainingError(_FULL) from error
            raise

    def _next_batch(self) -> Loaded:
        assert self._iterator is not None
        while self._batches_to_skip:
            # A stream has no random access: the batches before the start are read and dropped.
            self._batches_to_skip -= 1
            next(self._iterator, None)
        for loaded in self._iterator:
            if loaded is not None:
                return loaded
        return self._next_epoch()

    def _next_epoch(self) -> Loaded:
        """Starts the next epoch of a stream and returns its first batch."""
        self._iterator = iter(self._loader)
        loaded = next(self._iterator, None)
        if loaded is None:
            raise RequestError(self._too_small)
        self.position = Position(self.position.epoch + 1)
        self._states = {}
        return loaded

    def _advance(self, loaded: Loaded) -> None:
        """Advances the position by the batch that is about to be returned."""
        at = self.position
        self.counted, self.everyone = loaded.samples, loaded.everyone
        if loaded.everyone is None:
            self.epoch = at.epoch
            self.position = Position(at.epoch, batches=at.batches + 1, **self._states_after(loaded))
            return
        if self.samples is not None:
            left = self.samples - at.samples
            if left < (1 if self.is_uneven else self._samples_per_step):
                at = Position(at.epoch + 1)
        self.epoch = at.epoch
        self.position = Position(at.epoch, at.samples + loaded.everyone)

    def _states_after(self, loaded: Loaded) -> dict[str, Any]:
        """Where each loader process is in its stream, if the stream says so."""
        if loaded.state is None:
            return {}
        processes = max(1, self._loader.num_workers)
        self._states[loaded.process] = loaded.state
        states = tuple(self._states.get(process) for process in range(processes))
        return {"process": (loaded.process + 1) % processes, "states": states}


def build_loader(
    cfg: DataConfig,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    pin_memory: bool = False,
    start: Position | None = None,
) -> Loader:
    """Opens the data source that `cfg` describes and makes the loader of this rank's share.

    Args:
        cfg: the `data` node of the configuration.
        batch_size: samples per batch of this rank.
        rank: this worker's number among `world_size`.
        world_size: the number of workers that share the data.
        seed: determines the order together with the epoch; the same on all ranks.
        pin_memory: put batches into page-locked memory, for copies to CUDA.
        start: the position of an earlier loader to continue from; None starts at the beginning.

    Raises:
        RequestError: the source cannot be opened, or holds less than one batch for every rank.
    """
    if cfg.workers < 0:
        raise RequestError(f"data.workers={cfg.workers}: must be 0 (read in the worker itself) or more")
    if batch_size < 1:
        raise RequestError(f"train.batch_size={batch_size}: must be at least 1")
    if isinstance(cfg, TokenDataConfig):
        check_seq_len(cfg.seq_len)
    share = Share(rank, world_size, seed)
    source = hold_out(cfg.open(share), cfg.eval_fraction)
    return Loader(
        source,
        share,
        batch_size=batch_size,
        workers=cfg.workers,
        pin_memory=pin_memory,
        start=start or Position(),
        drop_last=cfg.drop_last,
    )


def _batches_per_epoch(source: Source, share: Share, batch_size: int, *, drop_last: bool) -> int | None:
    if source.samples is None:
        return None
    samples_per_step = batch_size * share.world_size
    batches = (source.samples if drop_last else source.samples + samples_per_step - 1) // samples_per_step
    if batches == 0:
        raise RequestError(_too_small(source, share, batch_size))
    return batches


def _too_small(source: Source, share: Share, batch_size: int) -> str:
    """The message for a source that has less than one batch for every rank."""
    needed = f"{counted(batch_size * share.world_size, 'sample')} a step"
    advice = "lower train.batch_size"
    if source.kind == "tokens":
        advice += " or data.seq_len"
    if source.samples is None:
        held = f"gives rank {share.rank} less than a batch per epoch and loader process"
        advice += ", or data.workers"
    else:
        held = f"holds {source.samples} to train on"
    return (
        f"train.batch_size={batch_size} on {counted(share.world_size, 'worker')} takes {needed}, but "
        f"{source.origin} {held}: {advice}, or give more data"
    )


def _data_loader(
    source: Source,
    share: Share,
    *,
    batch_size: int,
    workers: int,
    pin_memory: bool,
    start: Position,
    drop_last: bool,
) -> DataLoader[Any]:
    if source.max_workers is not None:
        workers = min(workers, source.max_workers)
    if source.is_stream:
        dataset: Any = Stream(source, share, batch_size, start, drop_last=drop_last)
        # A stream's iterator ends with each epoch, so its loader processes have to stay for the next one.
        options: dict[str, Any] = {"batch_size": None, "persistent_workers": workers > 0}
    else:
        dataset = Numbered(source)
        options = {"batch_sampler": EndlessBatches(source, share, batch_size, start, drop_last=drop_last)}
    collating: Any = Collating(source.collate, source.origin, compares=source.is_own and source.is_stream)
    return DataLoader(
        dataset,
        num_workers=workers,
        collate_fn=collating,
        pin_memory=pin_memory,
        # Forked processes share the data in memory, and inherit the blocked signals of the worker.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=start_loader_process,
        # The loader has its own generator. Otherwise torch would draw from the global one and change the dropout. It
        # seeds the loader processes, in which a source of somebody else may draw numbers: other ones on each rank.
        generator=torch.Generator().manual_seed(mix(share.seed, share.rank)),
        **options,
    )


@contextmanager
def _one_message() -> Iterator[None]:
    """Takes away the traceback that torch puts before the message of a loader process, and says what is full."""
    try:
        yield
    except RequestError as error:
        _, _, message = str(error).rpartition("errors.RequestError: ")
        raise RequestError(message.strip()) from None
    except RuntimeError as error:
        if any(sign in str(error) for sign in _NO_SHARED_MEMORY):
            raise TrainingError(_FULL) from error
        raise
