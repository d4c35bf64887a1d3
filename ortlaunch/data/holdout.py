"""The held-out part of the data, which is used for evaluation and never for training."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import Subset

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import Batch
from ortlaunch.data.reading import Chosen, Collating, Numbered, explained
from ortlaunch.data.source import Share, Source

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
    samples: int
    """How many count; 0 for a repeat, by which a rank without a further batch keeps up with the others."""


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
    if source.held_out is None:
        remedy = "raise data.eval_fraction"
        if source.is_own and source.is_stream:
            remedy = "let data.target return a mapping with 'train' and 'eval'"
        raise RequestError(f"train.eval_every: {source.origin} has no held-out samples: {remedy}")
    held_out = replace(source, dataset=source.held_out, origin=f"{source.origin}, held out")
    kept: Any = source.held_out
    if held_out.is_stream:
        with explained(f"reading {held_out.origin}"):
            kept = list(islice(kept, samples))
    count = min(samples, len(kept))
    if count == 0:
        raise RequestError(f"train.eval_every: {source.origin} holds out no sample: raise data.eval_fraction")
    numbered, collating = Numbered(replace(held_out, dataset=kept)), Collating(source.collate, held_out.origin)

    def batch(start: int, *, counts: bool = True) -> HeldOut:
        numbers = list(range(start, min(start + batch_size, count)))
        read = numbered.__getitems__(Chosen(numbers, count))
        return HeldOut(collating.batch(read.samples, numbers), len(numbers) if counts else 0)

    starts = range(0, count, batch_size)
    mine = [batch(start) for start in starts[share.rank :: share.world_size]]
    is_short = len(mine) < -(-len(starts) // share.world_size)
    return [*mine, batch(0, counts=False)] if is_short else mine
