"""Memory-mapped files of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ortlaunch.base.errors import RequestError
from ortlaunch.data.files import TOKENS_SUFFIX, check_token_type, find_files
from ortlaunch.data.source import Source, Tokens, as_ids, check_enough, digest_files


class TokenFiles(Dataset[dict[str, Any]]):
    """Files of tokens, cut into samples of `seq_len` tokens. No sample crosses the end of a file."""

    def __init__(self, paths: list[Path], dtype: np.dtype[Any], seq_len: int, vocab_size: int | None) -> None:
        self._paths = paths
        self._dtype = dtype
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        counts = [path.stat().st_size // dtype.itemsize // seq_len for path in paths]
        self._ends = np.cumsum(counts)
        self._maps: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        start = (index - first) * self._seq_len
        tokens = self._map(number)[start : start + self._seq_len]
        self._check(tokens, self._paths[number], start)
        return {"input_ids": as_ids(tokens)}

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map would copy the file.
        return {**self.__dict__, "_maps": {}}

    def _map(self, number: int) -> Tokens:
        if number not in self._maps:
            self._maps[number] = np.memmap(self._paths[number], dtype=self._dtype, mode="r")
        return self._maps[number]

    def _check(self, tokens: Tokens, path: Path, start: int) -> None:
        bad = tokens < 0
        if self._vocab_size is not None:
            bad = bad | (tokens >= self._vocab_size)
        if bad.any():
            at = int(np.argmax(bad))
            limit = "" if self._vocab_size is None else f" and below data.vocab_size={self._vocab_size}"
            raise RequestError(
                f"{path}: token {start + at} (byte {(start + at) * self._dtype.itemsize}) is {tokens[at]}, but ids "
                f"must be 0 or more{limit}; check data.dtype={self._dtype.name}, the file and its tokenizer"
            )


def open_token_files(path: str, dtype_name: str, seq_len: int, vocab_size: int | None) -> Source:
    """Opens files of little-endian token ids without a header as memory maps.

    Args:
        path: files, folders or globs, separated by commas.
        dtype_name: NumPy's name of the type of one token, one of `TOKEN_TYPES`.
        seq_len: tokens per sample.
        vocab_size: an upper bound that all tokens must be below; None if it is unknown.

    Raises:
        RequestError: a path is missing, the type is unknown, a file does not hold whole tokens, or no file holds a
            whole sample.
    """
    check_token_type(dtype_name)
    if vocab_size is not None and vocab_size < 1:
        raise RequestError(f"data.vocab_size={vocab_size}: must be at least 1, or null")
    dtype = np.dtype(dtype_name).newbyteorder("<")
    files = find_files(path, suffix=TOKENS_SUFFIX)
    longest = max(_count_tokens(file, dtype) for file in files)
    check_enough(longest, seq_len, f"data.path={path}")
    dataset = TokenFiles(files, dtype, seq_len, vocab_size)
    fingerprint = digest_files(files, "tokens", dtype_name)
    return Source(dataset, "tokens", f"data.path={path}", fingerprint, vocab_size=vocab_size)


def _count_tokens(path: Path, dtype: np.dtype[Any]) -> int:
    size = path.stat().st_size
    if size == 0:
        raise RequestError(f"{path}: the file is empty; remove it from data.path or write it again")
    if size % dtype.itemsize:
        raise RequestError(
            f"{path}: {size} bytes are no whole number of {dtype.itemsize}-byte tokens: "
            f"data.dtype={dtype.name} is not its type, or the file is cut off"
        )
    return size // dtype.itemsize
