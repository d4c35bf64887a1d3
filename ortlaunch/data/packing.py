"""A stream of documents, shared out, shuffled and packed into samples of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ortlaunch.data.encoding import DOCUMENTS_AT_ONCE, Encoder, batches_of
from ortlaunch.data.source import Share, Tokens, as_ids, mix

SHUFFLE_ROWS = 1000
"""Rows held back to be drawn from at random; shards are shuffled besides."""


class PackedStream(IterableDataset[dict[str, Any]]):
    """One rank's part of a streaming data set; each iteration is an epoch, and the next one has another order.

    Documents follow each other without padding; what does not fill a sample at the end of an epoch is dropped.
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
        """Takes a `datasets.IterableDataset` whose `column` holds text, and of it the documents that belong."""
        self._belongs = belongs
        self._data = data
        self._share = share
        self._encoder = encoder
        self._seq_len = seq_len
        self._column = column
        self._next_epoch = 0

    def start_at(self, epoch: int) -> None:
        """Makes `epoch` the next one; before the first iteration."""
        self._next_epoch = epoch

    @property
    def shards(self) -> int:
        """Parts that loader processes of this rank can read side by side."""
        return max(1, self._epoch_data(0).num_shards)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Counted by each loader process for itself: it keeps its copy of this object, and starts each epoch once.
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return ({"input_ids": as_ids(tokens)} for tokens in self._pack(epoch))

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
        # Shuffled anew per epoch instead of set_epoch: the library keeps the epoch in memory that loader processes
        # share, and they do not begin an epoch at the same time.
        from datasets.distributed import split_dataset_by_node

        shuffled = self._data.shuffle(seed=mix(self._share.seed, epoch), buffer_size=SHUFFLE_ROWS)
        return split_dataset_by_node(shuffled, rank=self._share.rank, world_size=self._share.world_size)
