"""Random tokens, for measuring without data."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import SyntheticConfig
from ortlaunch.data.source import Share, Source, as_ids, digest


class RandomTokens(Dataset[dict[str, Any]]):
    """Sample i is drawn from a generator seeded with (seed, i): nothing is stored, every rank can make any sample."""

    def __init__(self, samples: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self._samples = samples
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed % 2**64

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = np.random.default_rng((self._seed, index))
        return {"input_ids": as_ids(generator.integers(self._vocab_size, size=self._seq_len))}


def open_synthetic(cfg: SyntheticConfig, share: Share) -> Source:
    """Opens random token ids in [0, data.vocab_size).

    Raises:
        RequestError: data.samples or data.vocab_size is below 1.
    """
    for key, value in (("samples", cfg.samples), ("vocab_size", cfg.vocab_size)):
        if value < 1:
            raise RequestError(f"data.{key}={value}: must be at least 1")
    dataset = RandomTokens(cfg.samples, cfg.seq_len, cfg.vocab_size, share.seed)
    fingerprint = digest("synthetic", f"{cfg.samples} {cfg.seq_len} {cfg.vocab_size} {share.seed}")
    return Source(dataset, "tokens", f"data.samples={cfg.samples}", fingerprint, vocab_size=cfg.vocab_size)
