"""An endless iterator over the batches of one rank's share of a data source."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Sampler

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.base.sockets import socket_folder
from ortlaunch.base.text import counted
from ortlaunch.config.schema import DataConfig, TokenDataConfig
from ortlaunch.data.holdout import HeldOut, collate, held_out_batches, hold_out
from ortlaunch.data.packing import PackedStream
from ortlaunch.data.position import Position
from ortlaunch.data.processes import signals_held, start_loader_process
from ortlaunch.data.source import Share, Source, check_seq_len, mix

Batch = dict[str, torch.Tensor]

_NO_SHARED_MEMORY = ("unable to resize file </torch_", "unable to allocate shared memory", "out of shared memory")
"""What torch says where a loader process finds no room for a batch, before it writes or when the kernel ends it."""
_FULL = (
    "/dev/shm, through which loader processes hand over batches, has no room for them: free some (in Docker give "
    "--shm-size=1g), lower train.batch_size, or read in the worker itself by data.workers=0"
)


class EndlessBatches(Sampler[list[int]]):
    """Yields the sample numbers of each batch, over all epochs.

    One iterator serves the whole run, so loader processes prefetch across the end of an epoch. The order of the samples
    depends only on seed and epoch. Worker r of n takes every n-th sample of it, beginning with the r-th. All workers
    together thus see the same samples for any n, and any number of workers can resume at any position.
    """

    def __init__(self, source: Source, share: Share, batch_size: int, start: Position) -> None:
        self._samples = source.samples or 0
        self._share = share
        self._batch_size = batch_size
        self._start = start

    def __iter__(self) -> Iterator[list[int]]:
        samples_per_step = self._batch_size * self._share.world_size
        first = self._start.samples
        for epoch in count(self._start.epoch):
            generator = torch.Generator().manual_seed(mix(self._share.seed) + epoch)
            # A tensor, because a list of numbers takes eight times as much memory.
            left = torch.randperm(self._samples, generator=generator)[first:]
            steps = len(left) // samples_per_step
            mine = left[: steps * samples_per_step][self._share.rank :: self._share.world_size]
            for begin in range(0, len(mine), self._batch_size):
                yield mine[begin : begin + self._batch_size].tolist()
            first = 0


class Loader:
    """Iterates over batches without end. As a context manager, it closes itself at the end.

    Batches are {"input_ids": int64 [B, T], "labels": int64 [B, T]} or {"pixel_values": float32 [B, C, H, W],
    "labels": int64 [B]}. All ranks take the same number of batches per epoch; the rest of an epoch is dropped. The
    samples of a step over all ranks depend on the global batch size, but not on the number of ranks. Streams are the
    exception: each rank packs its own documents, and its epochs end when its part ends.

    Attributes:
        kind: "tokens" or "images".
        vocab_size: the number of distinct token ids, where known.
        num_classes: the number of labels, for images.
        fingerprint: a short hash that identifies the data set.
        origin: the data as the user typed it.
        labels_vary: whether samples may have other numbers of labels that count.
        samples: the training samples of one epoch over all workers, with the rest that is dropped; None for a stream.
        batches_per_epoch: the batches that this rank takes per epoch; None for a stream.
        epoch: the epoch of the batch returned last, counted from 0.
        position: the position of the next batch, which `build_loader` takes as `start`.
    """

    def __init__(
        self, source: Source, share: Share, *, batch_size: int, workers: int, pin_memory: bool, start: Position
    ) -> None:
        self.kind = source.kind
        self.vocab_size = source.vocab_size
        self.num_classes = source.num_classes
        self.fingerprint = source.fingerprint
        self.origin = source.origin
        self.labels_vary = source.labels_vary
        self.samples = source.samples
        self.batches_per_epoch = _batches_per_epoch(source, share, batch_size)
        self.epoch = start.epoch
        self.position = start
        self._samples_per_step = batch_size * share.world_size
        self._batches_to_skip = start.batches
        self._too_small = _too_small(source, share, batch_size)
        if isinstance(source.dataset, PackedStream):
            source.dataset.start_at(start.epoch)
        self._loader = _data_loader(
            source, share, batch_size=batch_size, workers=workers, pin_memory=pin_memory, start=start
        )
        self._iterator: Iterator[Batch] | None = None
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
        try:
            batch = self._next_batch()
        except RequestError as error:
            raise RequestError(_without_traceback(error)) from None
        except RuntimeError as error:
            if any(sign in str(error) for sign in _NO_SHARED_MEMORY):
                raise TrainingError(_FULL) from error
            raise
        self._advance()
        return batch

    def start_processes(self) -> None:
        """Starts the loader processes, if there are any, before the first batch is asked for.

        They are forked, and keep what this process has in memory by then, also when it has changed or freed it.
        """
        if self._iterator is None and self._loader.num_workers:
            self._iterator = self._begun()

    @property
    def processes(self) -> list[int]:
        """The numbers of the loader processes that have been started."""
        return [process.pid for process in getattr(self._iterator, "_workers", ())]

    def held_out(self, samples: int) -> list[HeldOut]:
        """This rank's batches of an evaluation on `samples` held-out samples; see `held_out_batches`."""
        return held_out_batches(self._source, self._share, batch_size=self._batch_size, samples=samples)

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

    def _begun(self) -> Iterator[Batch]:
        if self._loader.num_workers:
            self._sockets.enter_context(socket_folder())
        try:
            with signals_held():
                return iter(self._loader)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # Their semaphores are there, too.
                raise TrainingError(_FULL) from error
            raise

    def _next_batch(self) -> Batch:
        assert self._iterator is not None
        while self._batches_to_skip:
            # A stream has no random access: the batches before the start are read and dropped.
            self._batches_to_skip -= 1
            next(self._iterator, None)
        batch = next(self._iterator, None)
        return batch if batch is not None else self._next_epoch()

    def _next_epoch(self) -> Batch:
        """Starts the next epoch of a stream and returns its first batch."""
        self._iterator = iter(self._loader)
        batch = next(self._iterator, None)
        if batch is None:
            raise RequestError(self._too_small)
        self.position = Position(self.position.epoch + 1)
        return batch

    def _advance(self) -> None:
        """Advances the position by the batch that is about to be returned."""
        at = self.position
        if self.samples is None:
            self.epoch = at.epoch
            self.position = Position(at.epoch, batches=at.batches + 1)
            return
        if at.samples + self._samples_per_step > self.samples:
            at = Position(at.epoch + 1)
        self.epoch = at.epoch
        self.position = Position(at.epoch, at.samples + self._samples_per_step)


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
    )


def _batches_per_epoch(source: Source, share: Share, batch_size: int) -> int | None:
    if source.samples is None:
        return None
    batches = source.samples // share.world_size // batch_size
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
    source: Source, share: Share, *, batch_size: int, workers: int, pin_memory: bool, start: Position
) -> DataLoader[dict[str, Any]]:
    if source.max_workers is not None:
        workers = min(workers, source.max_workers)
    if source.samples is None:
        # A stream's iterator ends with each epoch, so its loader processes have to stay for the next one.
        options: dict[str, Any] = {"batch_size": batch_size, "drop_last": True, "persistent_workers": workers > 0}
    else:
        options = {"batch_sampler": EndlessBatches(source, share, batch_size, start)}
    return DataLoader(
        source.dataset,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        # Forked processes share the data in memory, and inherit the blocked signals of the worker.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=start_loader_process,
        # The loader has its own generator. Otherwise torch would draw from the global one and change the dropout. It
        # seeds the loader processes, in which a source of somebody else may draw numbers: other ones on each rank.
        generator=torch.Generator().manual_seed(mix(share.seed, share.rank)),
        **options,
    )


def _without_traceback(error: RequestError) -> str:
    """The message without the traceback that torch puts before it when a loader process raises."""
    _, _, message = str(error).rpartition("errors.RequestError: ")
    return message.strip()
