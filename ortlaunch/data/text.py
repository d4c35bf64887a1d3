"""Text files of the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import TextConfig
from ortlaunch.data.encoding import BYTE_VALUES, encode_all, load_encoder
from ortlaunch.data.files import find_files, read_bytes
from ortlaunch.data.source import Share, Source, array_source


def open_text(cfg: TextConfig, share: Share) -> Source:
    """Reads files into memory, as they are (bytes) or through a tokenizer, each file one document.

    Every rank reads and tokenizes all of it when it starts: for texts beyond some hundred megabytes, write token files
    once and use data=tokens.

    Raises:
        RequestError: A path or the tokenizer is missing, a file is no UTF-8 text, or there is less than one sample.
    """
    origin = f"data.path={cfg.path}"
    paths = find_files(cfg.path)
    if cfg.tokenizer is None:
        tokens = np.frombuffer(b"".join(read_bytes(path) for path in paths), dtype=np.uint8)
        return array_source(tokens, cfg.seq_len, origin, BYTE_VALUES)
    encoder = load_encoder(cfg.tokenizer)
    tokens = encode_all((_read_text(path) for path in paths), encoder)
    return array_source(tokens, cfg.seq_len, origin, encoder.vocab_size)


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: no UTF-8 text at byte {error.start}; leave the file out (data.path takes a glob) or convert it"
        ) from error
