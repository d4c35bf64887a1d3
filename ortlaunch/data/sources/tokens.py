"""Files of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig
from ortlaunch.data.files import TOKENS_SUFFIX, check_paths, check_token_type

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class TokensConfig(TokenDataConfig):
    """Memory-mapped files of token ids (.bin, as nanoGPT and Megatron-style tools write them without a header)."""

    name: str = "tokens"
    path: str = MISSING
    """A file, a folder or a glob; commas separate several of them."""
    dtype: str = "uint16"
    """NumPy type of one token: uint8, uint16, uint32, int32 or int64."""
    vocab_size: int | None = number(None, least=1)
    """Upper bound that all tokens must be below; null leaves the tokens unchecked and uses the model's own size."""

    def check(self) -> None:
        check_token_type(self.dtype)
        check_paths(self.path, suffix=TOKENS_SUFFIX)

    def open(self, share: Share) -> Source:
        from ortlaunch.data.token_files import open_token_files

        return open_token_files(self.path, self.dtype, self.seq_len, self.vocab_size)
