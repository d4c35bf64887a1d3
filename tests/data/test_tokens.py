"""Memory-mapped token files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import TokensConfig
from ortlaunch.data.loader import Loader
from ortlaunch.data.source import Share

Load = Callable[..., Loader]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_every_type_reads_back_what_was_written(tmp_path: Path, dtype: str) -> None:
    values = np.array([1, np.iinfo(dtype).max, 3, 4], dtype=np.dtype(dtype).newbyteorder("<"))
    values.tofile(tmp_path / "a.bin")
    source = TokensConfig(path=str(tmp_path), dtype=dtype, seq_len=4).open(Share(0, 1, 0))
    assert source.dataset[0]["input_ids"].tolist() == values.tolist()


def test_samples_go_through_the_files_in_order_and_never_cross(tmp_path: Path) -> None:
    for name, start, count in (("a.bin", 0, 7), ("b.bin", 100, 2), ("c.bin", 200, 6)):
        np.arange(start, start + count, dtype=np.uint16).tofile(tmp_path / name)
    (tmp_path / "meta.json").write_text("{}")
    source = TokensConfig(path=str(tmp_path), seq_len=3).open(Share(0, 1, 0))
    expected = [[0, 1, 2], [3, 4, 5], [200, 201, 202], [203, 204, 205]]
    assert source.samples == 4
    assert [source.dataset[i]["input_ids"].tolist() for i in range(4)] == expected


def test_a_large_file_is_neither_read_nor_pickled(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(20_000_000_000)  # sparse; reading it whole would take minutes and more memory than there is
    source = TokensConfig(path=str(path), seq_len=1024, vocab_size=5).open(Share(0, 1, 0))
    assert source.samples == 20_000_000_000 // 2 // 1024
    assert source.dataset[source.samples - 1]["input_ids"].sum() == 0
    assert len(pickle.dumps(source.dataset)) < 10_000


def test_a_token_outside_the_vocabulary_is_named_with_file_and_place(load: Load, tmp_path: Path) -> None:
    np.array([1, 2, 3, 9, 4, 5], dtype=np.uint16).tofile(tmp_path / "a.bin")
    cfg = TokensConfig(path=str(tmp_path), seq_len=2, vocab_size=9)
    with pytest.raises(RequestError, match=r"a.bin: token 3 \(byte 6\) is 9.*data.vocab_size=9"):
        next(load(cfg, batch_size=3))
    cfg.vocab_size = 10
    loader = load(cfg, batch_size=3)
    next(loader)
    assert loader.vocab_size == 10
    assert load(TokensConfig(path=str(tmp_path), seq_len=2)).vocab_size is None


def test_a_negative_token_is_an_error_without_a_vocabulary_too(load: Load, tmp_path: Path) -> None:
    np.array([1, -1], dtype=np.int32).tofile(tmp_path / "a.bin")
    with pytest.raises(RequestError, match=r"token 1 \(byte 4\) is -1"):
        next(load(TokensConfig(path=str(tmp_path), dtype="int32", seq_len=2), batch_size=1))


@pytest.mark.parametrize(
    ("size", "options", "parts"),
    [
        (8, {"dtype": "float32"}, ("data.dtype=float32", "uint8, uint16")),
        (7, {}, ("a.bin", "7 bytes", "data.dtype=uint16")),
        (0, {}, ("a.bin", "empty")),
        (8, {"seq_len": 5}, ("4 tokens", "data.seq_len=5")),
        (8, {"vocab_size": 0}, ("data.vocab_size=0",)),
    ],
)
def test_files_that_cannot_work_say_so(
    load: Load, tmp_path: Path, size: int, options: dict[str, object], parts: tuple[str, ...]
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(RequestError) as error:
        load(TokensConfig(**{"path": str(tmp_path), "seq_len": 2, **options}))  # type: ignore[arg-type]
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("path", ["", " , "])
def test_a_path_that_names_nothing_is_said(load: Load, path: str) -> None:
    """As two variables of a shell that are both empty."""
    with pytest.raises(RequestError, match=r"data\.path is not set"):
        load(TokensConfig(path=path))


def test_a_folder_without_token_files_says_what_it_looked_for(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for look in (load, TokensConfig.check):
        with pytest.raises(RequestError, match=r": the folder holds no file that ends in \.bin"):
            look(TokensConfig(path=str(tmp_path)))
    (tmp_path / "a.bin").touch()
    TokensConfig(path=str(tmp_path)).check()


def test_the_fingerprint_follows_names_sizes_ends_and_type(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(400_000))
    cfg = TokensConfig(path=str(path), seq_len=4)
    zero = load(cfg).fingerprint
    assert load(cfg).fingerprint == zero
    assert load(TokensConfig(path=str(path), seq_len=4, dtype="uint32")).fingerprint != zero
    path.write_bytes(bytes(399_999) + b"\x01")
    assert load(cfg).fingerprint != zero
