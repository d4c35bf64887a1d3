"""Text files of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig
from ortlaunch.data.files import check_paths, check_tokenizer, find_files, read_bytes

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source


@option("data")
@dataclass
class TextConfig(TokenDataConfig):
    """Text files, as bytes or through a tokenizer."""

    name: str = "text"
    path: str = MISSING
    """A file, a folder or a glob; commas separate several of them."""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer, or a tokenizer.json; null reads bytes."""

    def check(self) -> None:
        check_paths(self.path)
        check_tokenizer(self.tokenizer)

    def open(self, share: Share) -> Source:
        """Reads files into memory, as bytes or with a tokenizer. Each file is one document.

        Every rank reads and tokenizes all files when it starts. For texts of more than some hundred megabytes, write
        token files once and use data=tokens.

        Raises:
            RequestError: a path or the tokenizer is missing, a file is not UTF-8 text, or there is less than one
                sample.
        """
        import numpy as np

        from ortlaunch.data.encoding import BYTE_VALUES, encode_all, load_encoder
        from ortlaunch.data.source import array_source

        origin = f"data.path={self.path}"
        paths = find_files(self.path)
        if self.tokenizer is None:
            tokens = np.frombuffer(b"".join(read_bytes(path) for path in paths), dtype=np.uint8)
            return array_source(tokens, self.seq_len, origin, BYTE_VALUES)
        encoder = load_encoder(self.tokenizer)
        tokens = encode_all((_read_text(path) for path in paths), encoder)
        return array_source(tokens, self.seq_len, origin, encoder.vocab_size)


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: no UTF-8 text at byte {error.start}; leave the file out (data.path takes a glob) or convert it"
        ) from error
