"""What is held out for evaluation is never trained on, in any source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import (
    DataConfig,
    DigitsConfig,
    HfDataConfig,
    PysourceConfig,
    SyntheticConfig,
    TextConfig,
    TokensConfig,
)
from ortlaunch.data.loader import Loader

Load = Callable[..., Loader]


@pytest.fixture
def numbered(tmp_path: Path) -> TokensConfig:
    """100 samples of 4 tokens, the first of which is four times the sample's number."""
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "numbered.bin")
    return TokensConfig(path=str(tmp_path / "numbered.bin"), seq_len=4)


@pytest.fixture
def documents(tmp_path: Path) -> HfDataConfig:
    """400 documents of 8 bytes with their newline, no two alike."""
    rows = datasets.Dataset.from_dict({"text": [f"doc{number:04d}" for number in range(400)]})
    datasets.DatasetDict({"train": rows, "validation": rows.select(range(7))}).save_to_disk(str(tmp_path / "saved"))
    return HfDataConfig(path=str(tmp_path / "saved"), seq_len=8)


def key(batch: dict[str, torch.Tensor]) -> list[bytes]:
    return [sample.numpy().tobytes() for sample in batch.get("pixel_values", batch["labels"])]


def seen(batches: list[dict[str, torch.Tensor]]) -> list[bytes]:
    return [sample for batch in batches for sample in key(batch)]


def held_out(loader: Loader, samples: int) -> list[dict[str, torch.Tensor]]:
    """The batches of an evaluation that count."""
    return [one.batch for one in loader.held_out(samples) if one.samples]


@pytest.mark.parametrize("name", ["pysource", "synthetic", "digits", "text", "tokens", "hf", "stream"])
def test_no_held_out_sample_is_trained_on(
    load: Load, numbered: TokensConfig, documents: HfDataConfig, tmp_path: Path, name: str
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number:07d}\n" for number in range(300)))
    sources: dict[str, DataConfig] = {
        "pysource": PysourceConfig(seq_len=10_000),
        "synthetic": SyntheticConfig(seq_len=8, samples=300),
        "digits": DigitsConfig(),
        "text": TextConfig(path=str(tmp_path / "text.txt"), seq_len=8),
        "tokens": numbered,
        "hf": documents,
        "stream": HfDataConfig(path=documents.path, seq_len=8, streaming=True),
    }
    loader = load(sources[name], eval_fraction=0.1)
    evaluated = seen(held_out(loader, 10_000 if loader.samples else 40))
    epoch = loader.batches_per_epoch or 170
    trained = seen(list(islice(loader, epoch)))
    assert len(trained) > 5 * len(evaluated) > 0
    if name == "digits":
        # Some of its pictures are there twice: none may come up more often than it is there.
        there = seen([next(load(DigitsConfig(), batch_size=1797))])
        assert Counter(trained) + Counter(evaluated) <= Counter(there)
    else:
        assert not set(trained) & set(evaluated)
    if name == "pysource":
        whole = load(PysourceConfig(seq_len=10_000)).samples
        assert loader.samples == whole - int(whole * 0.1)


def test_a_tenth_of_a_stream_is_held_out_and_the_rest_trained(load: Load, documents: HfDataConfig) -> None:
    documents.streaming = True
    whole = set(seen(list(islice(load(documents), 200))))
    trained, evaluated = set(), set()
    loader = load(documents, eval_fraction=0.1, batch_size=1)
    while loader.epoch == 0:
        trained.update(key(next(loader)))
    evaluated.update(seen(held_out(loader, 200)))
    assert len(whole) == 400
    assert trained | evaluated == whole
    assert 20 <= len(evaluated) <= 60


@pytest.mark.parametrize("batch_size", [1, 3, 4, 18])
def test_each_held_out_sample_counts_once_in_batches_that_do_not_depend_on_the_workers(
    load: Load, numbered: TokensConfig, documents: HfDataConfig, batch_size: int
) -> None:
    """The end of the data, whatever the seed; of a stream, its first held-out documents."""
    documents.streaming = True
    for cfg, samples in ((numbered, 10), (documents, 9)):
        orders = set()
        for world_size in (1, 2, 3, 5):
            ranks = [
                load(cfg, eval_fraction=0.1, seed=world_size, rank=rank, world_size=world_size, batch_size=batch_size)
                for rank in range(world_size)
            ]
            everyone = [loader.held_out(samples) for loader in ranks]
            assert len({len(of_rank) for of_rank in everyone}) == 1
            in_order = [one for at in zip(*everyone, strict=True) for one in at]
            counted = [key(one.batch) for one in in_order if one.samples]
            assert all(len(one) == batch_size for one in counted[:-1])
            orders.add(tuple(sample for one in counted for sample in one))
        (order,) = orders
        assert len(set(order)) == len(order) == samples
        if cfg is numbered:
            assert [int(np.frombuffer(sample, dtype=np.int64)[0]) // 4 for sample in order] == list(range(90, 100))


def test_an_evaluation_is_limited_and_repeats_itself(load: Load, numbered: TokensConfig) -> None:
    loader = load(numbered, eval_fraction=0.5, batch_size=4)
    next(loader)
    first, again = held_out(loader, 10), held_out(loader, 10)
    assert seen(first) == seen(again)
    assert [len(batch["labels"]) for batch in first] == [4, 4, 2]


def test_a_stream_with_fewer_held_out_samples_than_asked_gives_each_once(load: Load, documents: HfDataConfig) -> None:
    documents.streaming = True
    there = seen(held_out(load(documents, eval_fraction=0.1), 10_000))
    assert len(set(there)) == len(there) > 20


def test_another_split_can_be_evaluated_on_and_then_all_is_trained(load: Load, documents: HfDataConfig) -> None:
    documents.eval_split = "validation"
    loader = load(documents, eval_fraction=0.1)
    assert loader.samples == 400
    assert len(seen(held_out(loader, 100))) == 7
    documents.eval_split = "train"
    with pytest.raises(RequestError, match=r"data\.eval_split=train"):
        load(documents)


@pytest.mark.parametrize("fraction", [0.0, 0.001])
def test_too_little_to_evaluate_on_is_said(load: Load, numbered: TokensConfig, fraction: float) -> None:
    with pytest.raises(RequestError, match=r"train\.eval_every.*data.eval_fraction"):
        load(numbered, eval_fraction=fraction).held_out(100)
