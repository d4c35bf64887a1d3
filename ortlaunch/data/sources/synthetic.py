"""Random tokens, for measurements without real data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class SyntheticConfig(TokenDataConfig):
    """Random tokens, the same for the same seed."""

    name: str = "synthetic"
    samples: int = number(4096, least=1)
    """Samples per epoch."""
    vocab_size: int = number(256, least=1)
    """Number of distinct tokens; all tokens are smaller than this."""

    def open(self, share: Share) -> Source:
        """Opens random token ids in [0, data.vocab_size)."""
        from ortlaunch.data.source import Computed, Source, digest

        dataset = Computed(self.samples, RandomTokens(self.seq_len, self.vocab_size, share.seed))
        fingerprint = digest("synthetic", f"{self.samples} {self.seq_len} {self.vocab_size} {share.seed}")
        origin = f"data.samples={self.samples}"
        return Source(dataset, "tokens", origin, fingerprint, vocab_size=self.vocab_size, labels_vary=False)


@dataclass(frozen=True)
class RandomTokens:
    """Draws sample i from a generator with the seed (seed, i). Any rank can make any sample, and none is stored."""

    seq_len: int
    vocab_size: int
    seed: int

    def __call__(self, index: int) -> dict[str, Any]:
        import numpy as np

        from ortlaunch.data.source import as_ids

        generator = np.random.default_rng((self.seed % 2**64, index))
        return {"input_ids": as_ids(generator.integers(self.vocab_size, size=self.seq_len))}
