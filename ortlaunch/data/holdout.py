"""The held-out part of the data, which is used for evaluation and never for training."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from ortlaunch.base.errors import RequestError
from ortlaunch.data.source import Share, Source

Batch = dict[str, Any]

_HASHED_CHARACTERS = 4096


def hold_out(source: Source, fraction: float) -> Source:
    """Holds out the last samples of a source, unless the source has held out a part itself.

    Samples are disjoint pieces in the order of the data. The held-out part of a text is therefore its end, and it does
    not depend on the seed or on the number of workers.

    Args:
        source: an opened source.
        fraction: the share of its samples to hold out, rounded down; 0 holds out nothing.
    """
    if source.held_out is not None or source.samples is None:
        return source
    trained = source.samples - int(source.samples * fraction)
    if trained == source.samples:
        return source
    return replace(
        source,
        dataset=Subset(source.dataset, range(trained)),
        held_out=Subset(source.dataset, range(trained, source.samples)),
    )


def is_held_out(document: str, fraction: float) -> bool:
    """Whether a document of a stream belongs to the held-out part.

    A hash of the document's first 4,096 characters decides, so every rank gets the same answer at any time. Documents
    with the same beginning are always on the same side.
    """
    return zlib.crc32(document[:_HASHED_CHARACTERS].encode(errors="replace")) < fraction * 2**32


def held_out_batches(source: Source, share: Share, *, batch_size: int, samples: int) -> list[Batch]:
    """This rank's batches of an evaluation. They are the same in every evaluation.

    Every rank has the same number of batches, and no sample is on two ranks. All ranks together take the first
    `samples` held-out samples, without a rest that does not fill a batch on every rank. For a stream, each rank takes
    the first samples of its own part.

    Args:
        source: an opened source, after `hold_out`.
        share: this rank's place.
        batch_size: samples per batch of this rank. A batch is smaller if this rank has fewer samples.
        samples: the largest number of samples of all ranks together.

    Raises:
        RequestError: there is not one held-out sample for every rank.
    """
    held_out = source.held_out
    if held_out is None:
        raise RequestError(f"train.eval_every: {source.origin} has no held-out samples: raise data.eval_fraction")
    mine = (
        _first_of_stream(held_out, samples // share.world_size)
        if isinstance(held_out, IterableDataset)
        else _first(held_out, min(samples, len(held_out)), share)  # type: ignore[arg-type]
    )
    size = min(batch_size, len(mine))
    if size == 0:
        raise RequestError(
            f"train.eval_every: {source.origin} holds out less than one sample for each of {share.world_size} workers: "
            "raise data.eval_fraction or train.eval_samples"
        )
    return [collate(mine[start : start + size]) for start in range(0, len(mine) - size + 1, size)]


def collate(samples: list[dict[str, Any]]) -> Batch:
    """Makes a batch from samples. Token samples get their own tokens as labels."""
    batch: Batch = default_collate(samples)
    if "labels" not in batch:
        # The labels are a copy because a model may mask its labels in place.
        batch["labels"] = batch["input_ids"].clone()
    return batch


def _first(held_out: Dataset[dict[str, Any]], count: int, share: Share) -> list[dict[str, Any]]:
    each = count // share.world_size
    return [held_out[index] for index in range(share.rank, each * share.world_size, share.world_size)]


def _first_of_stream(held_out: IterableDataset[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    # A stream that is too short starts again from its beginning, because every rank needs the same number of samples.
    taken: list[dict[str, Any]] = []
    while len(taken) < count:
        before = len(taken)
        taken += _up_to(iter(held_out), count - before)
        if len(taken) == before:
            break
    return taken


def _up_to(samples: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [sample for _, sample in zip(range(count), samples, strict=False)]
