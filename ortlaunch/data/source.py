"""The interface between data sources and the loader, and the functions that sources share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, default_collate

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.data.batch import IDS, LABELS, Batch

Tokens = NDArray[Any]
"""Token ids in one dimension, of any integer type."""

MIN_SEQ_LEN = 2
"""The least length of a sample: a model that predicts the next token needs a token and its successor."""

SAMPLED_BYTES = 1 << 16
"""The bytes at each end of a file that enter its fingerprint."""


@dataclass(frozen=True)
class Share:
    """The part of the data that this rank reads, and the seed of the order that all ranks share."""

    rank: int
    world_size: int
    seed: int
    shuffles: bool = True


def with_labels(samples: list[dict[str, Any]]) -> Batch:
    """Makes a batch of dicts of tensors. Token samples get their own tokens as labels."""
    batch: Batch = default_collate(samples)
    if LABELS not in batch:
        # The labels are a copy because a model may mask its labels in place.
        batch[LABELS] = batch[IDS].clone()
    return batch


@dataclass(frozen=True)
class Source:
    """An opened data source.

    Attributes:
        dataset: a map-style dataset or a stream. A map-style dataset has the whole data, and sample i is the same on
            every rank. A stream has this rank's part, and each iteration is an epoch.
        kind: "tokens", "images", or "own" for samples of any form.
        origin: the data as the user typed it, for messages.
        fingerprint: a short hash that identifies the data.
        vocab_size: the number of distinct token ids; None if it is unknown or the data is not tokens.
        num_classes: the number of labels of an image source.
        max_workers: the largest number of loader processes that can read a stream; None if there is no limit.
        held_out: the samples to evaluate on, none of which is in `dataset`; None if none are held out (yet). A stream
            is the same on every rank.
        labels_vary: whether samples may have other numbers of labels that count: labels of -100 do not.
        collate: makes a batch of samples.
        metrics: those of an evaluation where the request names none.
        notes: what the user should know of the data, one line each.
        is_divided: whether a stream is the whole data on every rank, and is to be shared out among them.
    """

    dataset: Dataset[Any]
    kind: str
    origin: str
    fingerprint: str
    vocab_size: int | None = None
    num_classes: int | None = None
    max_workers: int | None = None
    held_out: Dataset[Any] | None = None
    labels_vary: bool = True
    collate: Callable[[list[Any]], Batch] = with_labels
    is_divided: bool = False
    metrics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether the user's own code reads the samples."""
        return self.kind == "own"

    @property
    def is_stream(self) -> bool:
        """Whether the samples have no numbers, and come in the order of the data."""
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    @property
    def samples(self) -> int | None:
        """The number of samples in the data set; None for a stream, whose length is unknown."""
        return None if self.is_stream else len(self.dataset)  # type: ignore[arg-type]


class TokenArray(Dataset[dict[str, Any]]):
    """Token ids in memory, cut into samples of `seq_len` tokens. A shorter rest at the end is left out."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return len(self._tokens) // self._seq_len

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = index * self._seq_len
        return {"input_ids": as_ids(self._tokens[start : start + self._seq_len])}


class Computed(Dataset[dict[str, Any]]):
    """Samples that a function computes from their numbers."""

    def __init__(self, samples: int, sample: Callable[[int], dict[str, Any]]) -> None:
        """
        Args:
            samples: the number of samples.
            sample: computes a sample from its number, which is below `samples`. It must be picklable.
        """
        self._samples = samples
        self._sample = sample

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sample(index)


def as_ids(tokens: Tokens) -> torch.Tensor:
    """Copies token ids of any integer type into an int64 tensor of the same length."""
    return torch.from_numpy(tokens.astype(np.int64))


def array_source(tokens: Tokens, seq_len: int, origin: str, vocab_size: int) -> Source:
    """Cuts tokens held in memory into samples.

    Raises:
        RequestError: there are fewer tokens than one sample needs.
    """
    check_enough(len(tokens), seq_len, origin)
    fingerprint = digest(str(tokens.dtype), tokens)
    data = TokenArray(tokens, seq_len)
    return Source(data, "tokens", origin, fingerprint, vocab_size=vocab_size, labels_vary=False)


def check_seq_len(seq_len: int) -> None:
    """Raises RequestError if a sample would be too short to learn from."""
    if seq_len < MIN_SEQ_LEN:
        raise RequestError(f"data.seq_len={seq_len}: a sample needs at least {MIN_SEQ_LEN} tokens")


def check_enough(count: int, seq_len: int, origin: str) -> None:
    """Raises RequestError if `count` tokens do not fill one sample."""
    if count == 0:
        raise RequestError(f"{origin}: there is nothing in it; give data that is not empty")
    if count < seq_len:
        raise RequestError(
            f"{origin}: holds {counted(count, 'token')}, fewer than one sample of data.seq_len={seq_len}: "
            "lower data.seq_len or give more data"
        )


def mix(seed: int, *parts: int) -> int:
    """Hashes several numbers to one 32-bit seed, so that neighbouring seeds and epochs have different orders."""
    return int(np.random.SeedSequence([seed % 2**64, *parts]).generate_state(1)[0])


def digest(*parts: str | bytes | Tokens) -> str:
    """Hashes parts, in order, to 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        view = (memoryview(data) if isinstance(data, bytes) else np.ascontiguousarray(data).data).cast("B")
        state.update(view.nbytes.to_bytes(8, "little"))
        state.update(view)
    return state.hexdigest()


def digest_files(paths: Iterable[Path], *parts: str) -> str:
    """Hashes the names, the sizes and the bytes at both ends of files, without reading them whole."""
    pieces: list[str | bytes] = list(parts)
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(SAMPLED_BYTES)
            file.seek(max(0, size - SAMPLED_BYTES))
            pieces += [path.name, str(size), head, file.read(SAMPLED_BYTES)]
    return digest(*pieces)
