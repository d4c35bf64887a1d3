"""Endless batches of one rank's share of a data source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import DataConfig, TokenDataConfig
from ortlaunch.data.holdout import collate, held_out_batches, hold_out
from ortlaunch.data.packing import PackedStream
from ortlaunch.data.position import Position
from ortlaunch.data.processes import signals_held, start_loader_process
from ortlaunch.data.source import Share, Source, check_seq_len, mix

Batch = dict[str, torch.Tensor]


class EndlessBatches(Sampler[list[int]]):
    """Sample numbers of one batch after the other, over all epochs.

    One iterator lives for the whole run, so loader processes go on prefetching over the end of an epoch. The order is
    a function of seed, epoch and place in the epoch alone, and the workers take turns in it: what they see together
    does not depend on how many they are, and any number of them can go on from any place.
    """

    def __init__(self, source: Source, share: Share, batch_size: int, start: Position) -> None:
        # The order of all samples; taking turns in it comes after the start is cut off.
        self._order: DistributedSampler[Any] = DistributedSampler(
            source.dataset, num_replicas=1, rank=0, shuffle=True, seed=mix(share.seed)
        )
        self._share = share
        self._batch_size = batch_size
        self._start = start

    def __iter__(self) -> Iterator[list[int]]:
        together = self._batch_size * self._share.world_size
        first = self._start.samples
        for epoch in count(self._start.epoch):
            self._order.set_epoch(epoch)
            left = list(self._order)[first:]
            mine = left[: len(left) // together * together][self._share.rank :: self._share.world_size]
            yield from BatchSampler(mine, self._batch_size, drop_last=True)
            first = 0


class Loader:
    """Iterates over batches without end; also a context manager that closes itself.

    Batches are {"input_ids": int64 [B, T], "labels": int64 [B, T]} or {"pixel_values": float32 [B, C, H, W],
    "labels": int64 [B]}. All ranks take the same number of batches per epoch (the rest of an epoch is dropped), and
    what the ranks see together at a step depends on the global batch and not on how many share it. Streams are
    the exception: each rank packs its own documents, and its epochs end when its part ends.

    Attributes:
        kind: "tokens" or "images".
        vocab_size: Number of distinct token ids, where known.
        num_classes: Number of labels, for images.
        fingerprint: Short hash that identifies the data set.
        origin: The data as its user typed it.
        samples: Samples of one epoch over all workers, before the rest is dropped and without what is held out for
            evaluation; None for a stream.
        batches_per_epoch: Batches that this rank takes per epoch; None for a stream.
        epoch: Epoch of the batch returned last, counted from 0.
        position: Where the next batch begins; `build_loader` takes it as `start`.
    """

    def __init__(
        self, source: Source, share: Share, *, batch_size: int, workers: int, pin_memory: bool, start: Position
    ) -> None:
        self.kind = source.kind
        self.vocab_size = source.vocab_size
        self.num_classes = source.num_classes
        self.fingerprint = source.fingerprint
        self.origin = source.origin
        self.samples = source.samples
        self.batches_per_epoch = _batches_per_epoch(source, share, batch_size)
        self.epoch = start.epoch
        self.position = start
        self._together = batch_size * share.world_size
        self._skip = start.batches
        self._too_small = _too_small(source, share, batch_size)
        if isinstance(source.dataset, PackedStream):
            source.dataset.start_at(start.epoch)
        self._loader = _data_loader(
            source, share, batch_size=batch_size, workers=workers, pin_memory=pin_memory, start=start
        )
        self._iterator: Iterator[Batch] | None = None
        self._closed = False
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
            with signals_held():
                self._iterator = iter(self._loader)
        try:
            batch = self._next_batch()
        except RequestError as error:
            raise RequestError(_own_message(error)) from None
        self._move()
        return batch

    def held_out(self, samples: int) -> list[Batch]:
        """This rank's batches of an evaluation on `samples` held-out samples; see `held_out_batches`."""
        return held_out_batches(self._source, self._share, batch_size=self._batch_size, samples=samples)

    def close(self) -> None:
        """Ends the loader processes and waits for them; there are no batches afterwards. Can be called twice."""
        iterator, self._iterator, self._closed = self._iterator, None, True
        # torch ends them when the iterator is collected, which a traceback that holds it can delay for ever.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _next_batch(self) -> Batch:
        assert self._iterator is not None
        while self._skip:
            # A stream can only be read up to where it was left.
            self._skip -= 1
            next(self._iterator, None)
        return next(self._iterator, None) or self._next_epoch()

    def _next_epoch(self) -> Batch:
        """Starts a stream anew; returns its first batch."""
        self._iterator = iter(self._loader)
        batch = next(self._iterator, None)
        if batch is None:
            raise RequestError(self._too_small)
        self.position = Position(self.position.epoch + 1)
        return batch

    def _move(self) -> None:
        """Counts the batch that is about to be returned."""
        at = self.position
        if self.samples is None:
            self.epoch = at.epoch
            self.position = Position(at.epoch, batches=at.batches + 1)
            return
        if at.samples + self._together > self.samples:
            at = Position(at.epoch + 1)
        self.epoch = at.epoch
        self.position = Position(at.epoch, at.samples + self._together)


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
    """Opens the data source that `cfg` describes and shares it out.

    Args:
        cfg: The `data` node of the configuration.
        batch_size: Samples per batch of this rank.
        rank: This worker's number among `world_size`.
        world_size: Workers that share the data.
        seed: Fixes the order, together with the epoch; the same on all ranks.
        pin_memory: Put batches into page-locked memory, for copies to CUDA.
        start: Where an earlier loader was left; None begins at the beginning.

    Raises:
        RequestError: The source cannot be opened, or holds less than one batch for every rank.
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
    needed = f"{batch_size * share.world_size} samples a step"
    held = f"holds {source.samples} to train on"
    advice = "lower train.batch_size"
    if source.kind == "tokens":
        advice += " or data.seq_len"
    if source.samples is None:
        held = f"gives rank {share.rank} less than a batch per epoch and loader process"
        advice += ", or data.workers"
    return (
        f"train.batch_size={batch_size} on {share.world_size} workers takes {needed}, but {source.origin} {held}: "
        f"{advice}, or give more data"
    )


def _data_loader(
    source: Source, share: Share, *, batch_size: int, workers: int, pin_memory: bool, start: Position
) -> DataLoader[dict[str, Any]]:
    if source.max_workers is not None:
        workers = min(workers, source.max_workers)
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": True, "persistent_workers": workers > 0}
    if source.samples is not None:
        options = {"batch_sampler": EndlessBatches(source, share, batch_size, start)}
    return DataLoader(
        source.dataset,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        # Forked processes share the data in memory and start with the signals blocked that the worker has blocked.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=start_loader_process,
        # Its own generator: torch would draw from the global one, and the model's dropout would shift with it.
        generator=torch.Generator().manual_seed(mix(share.seed)),
        **options,
    )


def _own_message(error: RequestError) -> str:
    """The message without the traceback that torch puts around it when a loader process raises."""
    return str(error).rpartition("errors.RequestError: ")[2].strip()
