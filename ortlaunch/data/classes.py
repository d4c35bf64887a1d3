"""Opens labelled texts: a class for each text, for a pair of texts, or for each word."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import IDS, LABELS, Batch
from ortlaunch.data.encoding import load_tokenizer
from ortlaunch.data.source import Source, Tokens, digest

if TYPE_CHECKING:
    from ortlaunch.data.sources.hf import HfDataConfig

_IGNORED = -100
_MASK, _TYPES = "attention_mask", "token_type_ids"
_AT_ONCE = 1000


def open_labelled(cfg: HfDataConfig, data: Any, held_out: Any | None, datasets: ModuleType) -> Source:
    """Tokenizes labelled rows into memory, on every worker.

    Args:
        cfg: with ``label_column``.
        data: the rows to train on.
        held_out: the rows to evaluate on; None holds out a part of the others.
        datasets: the library.

    Raises:
        RequestError: a column is missing or holds something else, or the tokenizer cannot be loaded.
    """
    assert cfg.tokenizer is not None and cfg.label_column is not None
    tokenizer = load_tokenizer(cfg.tokenizer)
    names = _classes(data, cfg, datasets)
    # Rows often lie in the order of their classes, and the last ones may be held out.
    order = np.random.default_rng(0).permutation(len(data)).tolist()
    trained = _Labelled(data.select(order), cfg, tokenizer, names)
    of_words = trained.of_words
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Source(
        trained,
        "tokens",
        f"data.path={cfg.path}",
        digest(repr((cfg.seq_len, names)), *trained.content),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        num_classes=len(names) if names is not None else None,
        held_out=None if held_out is None else _Labelled(held_out, cfg, tokenizer, names),
        labels_vary=of_words,
        collate=partial(_padded, pad=pad or 0),
        metrics=("accuracy",) if names is not None else (),
    )


class _Labelled(Dataset[dict[str, Any]]):
    """Tokens with their labels; rows are cut at `data.seq_len` tokens."""

    def __init__(self, data: Any, cfg: HfDataConfig, tokenizer: Any, names: list[Any] | None) -> None:
        first = data[0][cfg.column] if len(data) else ""
        self.of_words = isinstance(first, list)
        self._rows: list[dict[str, Any]] = []
        numbers = {name: number for number, name in enumerate(names or ())}
        for rows in data.iter(batch_size=_AT_ONCE):
            texts = [rows[cfg.column]] if cfg.pair_column is None else [rows[cfg.column], rows[cfg.pair_column]]
            encoded = tokenizer(*texts, truncation=True, max_length=cfg.seq_len, is_split_into_words=self.of_words)
            for at, label in enumerate(rows[cfg.label_column]):
                row = {name: np.array(encoded[name][at], dtype=np.int32) for name in encoded if name in (IDS, _TYPES)}
                where = f"data.label_column={cfg.label_column}"
                if self.of_words:
                    labels: Any = _of_tokens(encoded.word_ids(at), [_number(one, numbers, where) for one in label])
                else:
                    labels = label if names is None else _number(label, numbers, where)
                self._rows.append({**row, LABELS: labels})

    @property
    def content(self) -> list[Tokens]:
        """All tokens and labels."""
        columns = ([np.atleast_1d(row[name]) for row in self._rows] for name in (IDS, LABELS))
        return [np.concatenate(column) for column in columns]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def _classes(data: Any, cfg: HfDataConfig, datasets: ModuleType) -> list[Any] | None:
    """The labels that the rows have, in the order of the model's classes; None for numbers to be fitted."""
    feature = data.features[cfg.label_column]
    feature = getattr(feature, "feature", feature)
    if isinstance(feature, datasets.ClassLabel):
        return list(range(feature.num_classes))
    found = {one for row in data[cfg.label_column] for one in (row if isinstance(row, list) else [row])}
    if any(isinstance(one, float) for one in found):
        return None
    if all(isinstance(one, int) for one in found):
        return list(range(max(found) + 1))
    if not all(isinstance(one, str) for one in found):
        raise RequestError(
            f"data.label_column={cfg.label_column}: rows without a label, or with something else than names and "
            "numbers: leave such rows out"
        )
    return sorted(found)


def _number(label: Any, numbers: dict[Any, int], where: str) -> int:
    """The class of a label; one that a data set does not know, such as -1, is refused."""
    if label not in numbers:
        known = ", ".join(map(str, list(numbers)[:5]))
        raise RequestError(f"{where}: there is the label {label!r}, and the training rows have {known}, …")
    return numbers[label]


def _of_tokens(words: list[int | None], tags: list[int]) -> list[int]:
    """The tag of each word at its first token, and nothing to learn at the others."""
    labels, before = [], None
    for word in words:
        labels.append(_IGNORED if word is None or word == before else tags[word])
        before = word
    return labels


def _padded(samples: list[dict[str, Any]], pad: int) -> Batch:
    fillings = {IDS: pad, _TYPES: 0, LABELS: _IGNORED}
    columns = {name: [torch.as_tensor(np.asarray(one[name])) for one in samples] for name in samples[0]}
    batch = {
        name: pad_sequence(rows, batch_first=True, padding_value=fillings[name]) if rows[0].ndim else torch.stack(rows)
        for name, rows in columns.items()
    }
    batch = {name: one.float() if one.is_floating_point() else one.long() for name, one in batch.items()}
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in columns[IDS]], batch_first=True)
    return {IDS: batch.pop(IDS), _MASK: mask, **batch}
