"""Converts text to token ids: as bytes, or with a tokenizer from local files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ortlaunch.base.errors import RequestError
from ortlaunch.data.source import Tokens

BYTE_VALUES = 256
DOCUMENTS_AT_ONCE = 256
"""The number of documents that a tokenizer gets at once: enough for its threads, few enough to limit its memory."""

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Usual names of the token that ends a document. A tokenizer.json does not say which one it uses."""


class Encoder(Protocol):
    """Turns documents into token ids smaller than `vocab_size`."""

    vocab_size: int

    def encode(self, documents: list[str]) -> Tokens:
        """Encodes documents into one array. Each document is followed by its end mark."""


class ByteEncoder:
    """Encodes text as UTF-8 bytes. A newline ends each document."""

    vocab_size = BYTE_VALUES

    def encode(self, documents: list[str]) -> Tokens:
        """See `Encoder.encode`."""
        return np.frombuffer("".join(f"{document}\n" for document in documents).encode(), dtype=np.uint8)


class TokenizerEncoder:
    """Encodes text with a tokenizer of the `tokenizers` or `transformers` library, and its end token if it has one."""

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        self._tokenizer = tokenizer
        self._end = [] if end is None else [end]
        # Ids can have gaps, so the vocabulary's size follows from the largest id, not from the number of entries.
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.int32

    def encode(self, documents: list[str]) -> Tokens:
        """See `Encoder.encode`."""
        ids = [token for document in self._ids(documents) for token in (*document, *self._end)]
        return np.array(ids, dtype=self._dtype)

    def _ids(self, documents: list[str]) -> list[list[int]]:
        if hasattr(self._tokenizer, "encode_batch_fast"):
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
        # verbose=False hides the warning about long documents, which are cut into samples afterwards.
        encoded = self._tokenizer(documents, add_special_tokens=False, truncation=False, padding=False, verbose=False)
        return encoded["input_ids"]


def load_encoder(tokenizer: str | None) -> Encoder:
    """Loads the encoder that `data.tokenizer` names.

    Args:
        tokenizer: a folder of a transformers tokenizer, a tokenizer.json, or None for bytes.

    Raises:
        RequestError: the folder or file does not exist, or holds no tokenizer.
    """
    if tokenizer is None:
        return ByteEncoder()
    path = Path(tokenizer).expanduser()
    with _refusing(path, tokenizer):
        return _from_folder(path) if path.is_dir() else _from_file(path)


def load_tokenizer(name: str) -> Any:
    """Loads the transformers tokenizer that `data.tokenizer` names, a folder.

    Raises:
        RequestError: the folder does not exist, or holds no tokenizer.
    """
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    with _refusing(path, name):
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


@contextlib.contextmanager
def _refusing(path: Path, name: str) -> Iterator[None]:
    """Turns the errors of the libraries into one message."""
    if not path.exists():
        raise RequestError(f"data.tokenizer={name}: no such folder or file; give a local tokenizer")
    try:
        yield
    except Exception as error:  # The libraries raise many types, also plain Exception.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(f"data.tokenizer={name}: not a tokenizer that can be loaded: {reason}") from error


def encode_all(documents: Iterable[str], encoder: Encoder) -> Tokens:
    """Encodes all documents into one array."""
    pieces = [encoder.encode(batch) for batch in batches_of(documents, DOCUMENTS_AT_ONCE)]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


def batches_of(documents: Iterable[str], count: int) -> Iterator[list[str]]:
    """Groups documents into lists of `count`. The last list may be shorter."""
    iterator = iter(documents)
    while batch := list(islice(iterator, count)):
        yield batch


def _from_folder(path: Path) -> Encoder:
    tokenizer = load_tokenizer(str(path))
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return TokenizerEncoder(tokenizer, end)


def _from_file(path: Path) -> Encoder:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    # A tokenizer.json can hold the truncation and padding of the task that it was saved for.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = (tokenizer.token_to_id(name) for name in END_TOKENS)
    return TokenizerEncoder(tokenizer, next((end for end in ends if end is not None), None))
