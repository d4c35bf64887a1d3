"""The held-out part of the data, which is used for evaluation and never for training."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, Subset, default_collate

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


@dataclass(frozen=True)
class HeldOut:
    """A batch of an evaluation."""

    batch: Batch
    counts: bool
    """False for a repeat, by which a rank without a further batch keeps up with the others."""


def held_out_batches(source: Source, share: Share, *, batch_size: int, samples: int) -> list[HeldOut]:
    """This rank's batches of an evaluation. They are the same in every evaluation.

    All ranks together take each of the first `samples` held-out samples once. Batch k goes to rank k modulo their
    number, and only the last one may be smaller, so that the batches do not depend on the number of ranks.

    Args:
        source: an opened source, after `hold_out`.
        share: this rank's place.
        batch_size: samples per batch.
        samples: the largest number of samples of all ranks together.

    Raises:
        RequestError: there is no held-out sample.
    """
    held_out = source.held_out
    if held_out is None:
        raise RequestError(f"train.eval_every: {source.origin} has no held-out samples: raise data.eval_fraction")
    kept: Any = list(islice(held_out, samples)) if isinstance(held_out, IterableDataset) else held_out
    count = min(samples, len(kept))
    if count == 0:
        raise RequestError(f"train.eval_every: {source.origin} holds out no sample: raise data.eval_fraction")

    def batch(start: int) -> Batch:
        return collate([kept[index] for index in range(start, min(start + batch_size, count))])

    starts = range(0, count, batch_size)
    mine = [HeldOut(batch(start), counts=True) for start in starts[share.rank :: share.world_size]]
    is_short = len(mine) < -(-len(starts) // share.world_size)
    return [*mine, HeldOut(batch(0), counts=False)] if is_short else mine


def collate(samples: list[dict[str, Any]]) -> Batch:
    """Makes a batch from samples. Token samples get their own tokens as labels."""
    batch: Batch = default_collate(samples)
    if "labels" not in batch:
        # The labels are a copy because a model may mask its labels in place.
        batch["labels"] = batch["input_ids"].clone()
    return batch
