"""A stream of documents, divided among the ranks, shuffled and packed into samples of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ortlaunch.data.encoding import DOCUMENTS_AT_ONCE, Encoder, batches_of
from ortlaunch.data.source import Share, Tokens, as_ids, mix

SHUFFLE_ROWS = 1000
"""The size of the shuffle buffer in rows. The shards are shuffled too."""


class PackedStream(IterableDataset[dict[str, Any]]):
    """One rank's part of a streaming data set. Each iteration is an epoch with an order of its own.

    Documents follow each other without padding. The tokens at the end of an epoch that fill no sample are dropped.
    """

    def __init__(
        self,
        data: Any,
        share: Share,
        encoder: Encoder,
        *,
        seq_len: int,
        column: str,
        belongs: Callable[[str], bool] = lambda document: True,
    ) -> None:
        """Takes a `datasets.IterableDataset` whose `column` holds text. Documents for which `belongs` is false are
        left out."""
        self._belongs = belongs
        self._data = data
        self._share = share
        self._encoder = encoder
        self._seq_len = seq_len
        self._column = column
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`."""
        self._epoch = epoch

    @property
    def shards(self) -> int:
        """The number of parts that loader processes of this rank can read in parallel."""
        return max(1, self._epoch_data(0).num_shards)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"input_ids": as_ids(tokens)} for tokens in self._pack(self._epoch))

    def _pack(self, epoch: int) -> Iterator[Tokens]:
        rest: Tokens = np.empty(0, dtype=np.int64)
        texts = (row[self._column] for row in self._epoch_data(epoch))
        mine = (text for text in texts if text is not None and self._belongs(text))
        for documents in batches_of(mine, DOCUMENTS_AT_ONCE):
            rest = np.concatenate([rest, self._encoder.encode(documents)])
            whole = len(rest) // self._seq_len * self._seq_len
            yield from rest[:whole].reshape(-1, self._seq_len)
            rest = rest[whole:]

    def _epoch_data(self, epoch: int) -> Any:
        # Each epoch shuffles with its own seed instead of calling set_epoch. The library keeps that epoch in memory
        # that loader processes share, but they do not begin an epoch at the same time.
        from datasets.distributed import split_dataset_by_node

        data = self._data
        if self._share.shuffles:
            data = data.shuffle(seed=mix(self._share.seed, epoch), buffer_size=SHUFFLE_ROWS)
        return split_dataset_by_node(data, rank=self._share.rank, world_size=self._share.world_size)
