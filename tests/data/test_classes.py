"""Labelled texts of the datasets library: a class for each, for a pair, or for each word."""

from __future__ import annotations

import datasets
import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import HfDataConfig
from tests.support.chat import write_tokenizer

NAMES = ["bad", "fair", "good"]
ROWS = {
    "first": [f"text {number}" * (1 + number % 3) for number in range(12)],
    "second": [f"more {number}" for number in range(12)],
    "label": [NAMES[number // 4] for number in range(12)],
    "words": [["one", "two", "three"][: 1 + number % 3] for number in range(12)],
    "tags": [["A", "O", "B"][: 1 + number % 3] for number in range(12)],
    "score": [number / 4 for number in range(12)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    write_tokenizer(folder / "tokenizer")
    rows = datasets.Dataset.from_dict(ROWS)
    named = rows.add_column("number", [NAMES.index(one) for one in ROWS["label"]])
    named = named.cast_column("number", datasets.ClassLabel(names=NAMES))
    odd = named.select([0]).map(lambda row: {"label": "superb"})
    datasets.DatasetDict({"train": named, "odd": odd}).save_to_disk(str(folder / "data"))
    return folder


@pytest.fixture
def opened(folder, load):
    words = {"path": str(folder / "data"), "tokenizer": str(folder / "tokenizer"), "drop_last": False, "seq_len": 16}
    return lambda **more: load(HfDataConfig(**{**words, **more}), batch_size=4)


@pytest.mark.parametrize("column", ["label", "number"])
def test_each_text_comes_once_with_its_class(opened, folder, column):
    from transformers import AutoTokenizer

    loader = opened(column="first", pair_column="second", label_column=column, seq_len=64)
    assert (loader.num_classes, loader.metrics, loader.labels_vary) == (3, ("accuracy",), False)
    found = []
    for _ in range(3):
        batch = next(loader)
        lengths = batch["attention_mask"].sum(1).tolist()
        assert max(lengths) == batch["input_ids"].shape[1]
        found += [
            (tuple(ids[:length].tolist()), label)
            for ids, length, label in zip(batch["input_ids"], lengths, batch["labels"].tolist(), strict=True)
        ]
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    ids = tokenizer(ROWS["first"], ROWS["second"])["input_ids"]
    assert sorted(found) == sorted((tuple(one), number // 4) for number, one in enumerate(ids))
    # Rows lie in the order of their classes, and the last ones are held out.
    assert len({label for _, label in found[-4:]}) > 1


def test_a_word_has_its_tag_at_its_first_token(opened):
    loader = opened(column="words", label_column="tags")
    assert (loader.num_classes, loader.labels_vary) == (3, True)
    batches = [next(loader) for _ in range(3)]
    longest = next(row for batch in batches for row in batch["labels"] if int((row != -100).sum()) == 3)
    # The bytes of one, two and three; A, B and O are numbered in this order.
    expected = [0, -100, -100, 2, -100, -100, 1, -100, -100, -100, -100]
    assert longest.tolist() == expected
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == 24


def test_numbers_are_fitted_and_long_texts_are_cut(opened):
    loader = opened(column="first", label_column="score")
    batch = next(loader)
    assert batch["labels"].dtype is torch.float32 and loader.metrics == () and loader.num_classes is None
    assert batch["input_ids"].shape[1] <= 16


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"column": "frist", "label_column": "label"}, "data.column=frist: .* has the columns first, second"),
        ({"column": "first", "label_column": "lable"}, "data.label_column=lable: .* has the columns"),
        ({"column": "first", "label_column": "label", "eval_split": "odd"}, "there is the label 'superb', and"),
        ({"column": "first", "label_column": "label", "eval_split": "train"}, "is the same as data.split"),
    ],
)
def test_what_cannot_be_learnt_is_said(opened, more, said):
    with pytest.raises(RequestError, match=said):
        opened(**more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pair_column": "second"}, "is for classes of texts: give data.label_column"),
        ({"label_column": "label", "tokenizer": None}, "give data.tokenizer, that of the model"),
        ({"label_column": "label", "streaming": True}, "set data.streaming=false"),
    ],
)
def test_keys_that_do_not_go_together(folder, more, said):
    with pytest.raises(RequestError, match=said):
        HfDataConfig(**{"path": str(folder / "data"), "tokenizer": str(folder / "tokenizer"), **more}).check()
