"""Shared parts of the data tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.config.schema import DataConfig
from ortlaunch.data.loader import Loader, build_loader

Load = Callable[..., Loader]


@pytest.fixture
def load() -> Iterator[Load]:
    """`build_loader` for a single rank and of all samples, nothing held out, unless told otherwise; loaders are closed
    when the test ends."""
    opened: list[Loader] = []

    def _load(cfg: DataConfig, eval_fraction: float = 0.0, **options: Any) -> Loader:
        cfg.eval_fraction = eval_fraction
        opened.append(build_loader(cfg, **{"batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, **options}))
        return opened[-1]

    yield _load
    for loader in opened:
        loader.close()


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer, trained here, with an end token and cutting switched on in its file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
