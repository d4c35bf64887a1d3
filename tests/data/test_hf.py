"""Data sets of the datasets library: saved, as files, streamed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import datasets
import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import HfDataConfig
from ortlaunch.data import hf_datasets
from ortlaunch.data.loader import Loader
from ortlaunch.data.source import Share

Load = Callable[..., Loader]
ROWS = [f"document {number:03d}" for number in range(120)]
ROW_BYTES = 13
"""Length of a row of ROWS with the newline that ends it, so that a sample of this length is one row."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the library's cache out of the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """Four files of 10, 20, 30 and 60 rows, with a column of numbers beside the text."""
    folder = tmp_path / "files"
    folder.mkdir()
    for part, (start, end) in enumerate(pairwise((0, 10, 30, 60, 120))):
        rows = ROWS[start:end]
        lines = [json.dumps({"number": number, "text": row}) for number, row in enumerate(rows)]
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved DatasetDict with two splits."""
    path = tmp_path / "saved"
    splits = {
        "train": datasets.Dataset.from_dict({"text": ROWS, "number": list(range(120))}, split="train"),
        "test": datasets.Dataset.from_dict({"text": ["held out row"] * 3, "number": [1, 2, 3]}, split="test"),
    }
    datasets.DatasetDict(splits).save_to_disk(str(path))
    return path


def config(path: Path | str, **options: object) -> HfDataConfig:
    """One row per sample."""
    return HfDataConfig(**{"path": str(path), "seq_len": ROW_BYTES, **options})  # type: ignore[arg-type]


def rows(loader: Loader, batches: int) -> list[str]:
    """The text of the samples of the next batches."""
    return [bytes(ids).decode().strip() for batch in islice(loader, batches) for ids in batch["input_ids"].tolist()]


def test_a_saved_data_set_in_memory(load: Load, saved: Path) -> None:
    loader = load(config(saved), batch_size=10)
    assert sorted(rows(loader, 12)) == ROWS
    assert (loader.kind, loader.vocab_size, loader.samples) == ("tokens", 256, 120)
    assert rows(load(config(saved, split="test"), batch_size=3), 1) == ["held out row"] * 3


def test_a_folder_of_data_files_and_a_single_one(load: Load, jsonl: Path) -> None:
    assert sorted(rows(load(config(jsonl), batch_size=10), 12)) == ROWS
    assert sorted(rows(load(config(jsonl / "part-2.jsonl"), batch_size=10), 3)) == ROWS[30:60]


def test_the_fingerprint_is_of_the_content(load: Load, saved: Path, jsonl: Path) -> None:
    assert load(config(saved)).fingerprint == load(config(jsonl)).fingerprint
    assert load(config(saved)).fingerprint != load(config(jsonl / "part-1.jsonl")).fingerprint
    streams = [load(config(path, streaming=True)).fingerprint for path in (jsonl, jsonl, jsonl / "part-1.jsonl")]
    assert streams[0] == streams[1] != streams[2]


def test_a_text_file_and_missing_values(load: Load, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(ROWS) + "\n")
    assert sorted(rows(load(config(tmp_path / "lines.txt"), batch_size=10), 12)) == ROWS
    lines = [json.dumps({"text": row if number % 2 else None}) for number, row in enumerate(ROWS)]
    (tmp_path / "gaps.jsonl").write_text("\n".join(lines))
    for streaming in (False, True):
        loader = load(config(tmp_path / "gaps.jsonl", streaming=streaming), batch_size=10)
        assert sorted(rows(loader, 6)) == ROWS[1::2]


def test_a_tokenizer_packs_documents_with_an_end_token(load: Load, saved: Path, tokenizer_file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    source = config(saved, tokenizer=str(tokenizer_file), seq_len=64).open(Share(0, 1, 0))
    text = tokenizer.decode(source.dataset[0]["input_ids"].tolist(), skip_special_tokens=False)
    assert text.startswith("document 000<|endoftext|>document 001<|endoftext|>")
    assert source.vocab_size == tokenizer.get_vocab_size()


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (2, 2), (3, 0), (3, 2), (8, 3)])
def test_streams_share_out_every_document_once_per_epoch(
    load: Load, jsonl: Path, world_size: int, workers: int
) -> None:
    epochs: list[list[str]] = [[], [], []]
    for rank in range(world_size):
        cfg = config(jsonl, streaming=True, workers=workers)
        with load(cfg, batch_size=1, rank=rank, world_size=world_size) as loader:
            while loader.epoch < 2:
                row = rows(loader, 1)
                epochs[loader.epoch] += row
    assert sorted(epochs[0]) == sorted(epochs[1]) == ROWS
    assert epochs[0] != epochs[1]


def test_streams_shuffle_by_seed_and_epoch(load: Load, saved: Path) -> None:
    def epochs(seed: int) -> tuple[list[str], list[str]]:
        loader = load(config(saved, streaming=True), batch_size=10, seed=seed)
        first = rows(loader, 12)
        assert loader.epoch == 0
        second = rows(loader, 12)
        assert loader.epoch == 1
        return first, second

    first, second = epochs(1)
    assert sorted(first) == sorted(second) == ROWS
    assert first != second
    assert (first, second) == epochs(1)
    assert first not in epochs(2)
    assert second not in epochs(2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [3, 12, 17])
def test_a_stream_goes_on_where_it_was_left(load: Load, saved: Path, taken: int, workers: int) -> None:
    """12 batches of 10 are an epoch."""
    cfg = config(saved, streaming=True, workers=workers)
    expected = rows(load(cfg, batch_size=10), 30)
    left = load(cfg, batch_size=10)
    rows(left, taken)
    resumed = load(cfg, batch_size=10, start=left.position)
    assert rows(resumed, 10) == expected[taken * 10 : (taken + 10) * 10]
    assert resumed.epoch == (taken + 9) // 12


def test_a_saved_stream_is_cut_into_a_part_per_loader_process(load: Load, saved: Path) -> None:
    loaders = [
        load(config(saved, streaming=True, workers=2), batch_size=1, rank=rank, world_size=2) for rank in range(2)
    ]
    before = set(multiprocessing.active_children())
    assert sorted(rows(loaders[0], 60) + rows(loaders[1], 60)) == ROWS
    assert len(set(multiprocessing.active_children()) - before) == 4


def test_a_stream_packs_documents_without_a_gap(load: Load, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(1500)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    total = sum(len(line) + 1 for line in lines)
    loader = load(config(tmp_path / "lines.txt", streaming=True, seq_len=100), batch_size=1)
    text = "".join(bytes(next(loader)["input_ids"][0].tolist()).decode() for _ in range(total // 100))
    assert loader.epoch == 0
    whole = text.split("\n")[:-1]
    assert len(set(whole)) == len(whole) >= 1480
    assert set(whole) <= set(lines)


def test_a_stream_is_tokenized_in_loader_processes(load: Load, saved: Path, tokenizer_file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    cfg = config(saved, streaming=True, workers=2, tokenizer=str(tokenizer_file), seq_len=30)
    batch = next(load(cfg, batch_size=4))
    text = "".join(tokenizer.decode(ids, skip_special_tokens=False) for ids in batch["input_ids"].tolist())
    assert len({part for part in text.split("<|endoftext|>") if part in ROWS}) > 4


def test_a_stream_too_short_for_a_sample_stops(load: Load, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short\n")
    for workers in (0, 1):
        loader = load(config(tmp_path / "short.txt", streaming=True, workers=workers))
        with pytest.raises(RequestError, match=r"^train.batch_size=2 .* data.path=.*short.txt gives rank 0 less than"):
            next(loader)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"column": "body"}, ("data.column=body", "number, text")),
        ({"column": "number"}, ("data.column=number", "int, not text")),
        ({"split": "dev"}, ("files", "dev")),
        ({"path": "/nowhere/at/all"}, ("data.path=/nowhere/at/all", "no such file or folder")),
        ({"path": ""}, ("data.path is not set",)),
    ],
)
def test_requests_that_cannot_work_say_so(
    load: Load, jsonl: Path, streaming: bool, options: dict[str, str], parts: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as error:
        load(config(**{"path": jsonl, "streaming": streaming, **options}))  # type: ignore[arg-type]
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_single_saved_split_under_another_name_is_not_taken_for_it(load: Load, saved: Path) -> None:
    with pytest.raises(RequestError, match=r"is the split test; set data.split=test"):
        load(config(saved / "test"))
    assert load(config(saved / "test", split="test"), batch_size=3).samples == 3


def test_a_split_that_a_saved_data_set_lacks_is_named(load: Load, saved: Path) -> None:
    with pytest.raises(RequestError, match=r"data.split=dev: .* has the splits train, test"):
        load(config(saved, split="dev"))


def test_broken_files_and_files_of_no_known_kind_are_named(load: Load, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    for streaming in (False, True):
        with pytest.raises(RequestError, match=r"data.path=.*broken.jsonl: cannot be loaded: "):
            load(config(tmp_path / "broken.jsonl", streaming=streaming))
    (tmp_path / "data.xyz").write_text("text")
    with pytest.raises(RequestError, match=r"data.path=.*data.xyz: not a data file"):
        load(config(tmp_path / "data.xyz"))


def test_a_hub_id_that_cannot_be_reached_is_the_users_error(tmp_path: Path) -> None:
    code = (
        "from ortlaunch.config.schema import HfDataConfig\n"
        "from ortlaunch.data.loader import build_loader\n"
        "build_loader(HfDataConfig(path='nobody/nothing'), batch_size=1, rank=0, world_size=1, seed=0)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=120)
    assert "RequestError: data.path=nobody/nothing: cannot be loaded: " in done.stderr


def test_without_the_library_the_extra_is_named(load: Load, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match=r"pip install 'ortlaunch\[hf\]'"):
        load(config(saved))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), RequestError),
        (ModuleNotFoundError("No module named 'multiprocess'", name="multiprocess"), ModuleNotFoundError),
        (ImportError("libarrow.so: failed to map segment from shared object"), ImportError),
    ],
)
def test_only_a_missing_library_is_called_missing(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, raised: type[Exception]
) -> None:
    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "datasets":
                raise error

    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(raised) as caught:
        hf_datasets.import_datasets("data=hf")
    assert type(caught.value) is raised
