"""Text files as bytes and through tokenizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import TextConfig
from ortlaunch.data.files import find_files
from ortlaunch.data.loader import Loader
from ortlaunch.data.source import Share

Load = Callable[..., Loader]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, one of them in a subfolder, beside hidden and empty files."""
    root = tmp_path / "my texts"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_text("the lazy dog. ")
    (root / "sub" / "a.md").write_text("the quick fox. ")
    (root / ".hidden").write_text("HIDDEN")
    (root / ".git" / "config").write_text("HIDDEN")
    (root / "empty.txt").write_text("")
    return root


def ids(cfg: TextConfig) -> list[int]:
    """All whole samples in file order."""
    dataset = cfg.open(Share(0, 1, 0)).dataset
    return [token for i in range(len(dataset)) for token in dataset[i]["input_ids"].tolist()]  # type: ignore[arg-type]


def read(path: str) -> str:
    """The text that bytes in file order spell."""
    return bytes(ids(TextConfig(path=path, seq_len=2))).decode()


def test_a_folder_is_read_recursively_without_what_is_hidden(folder: Path) -> None:
    assert read(str(folder)) == "the lazy dog. the quick fox. "[:28]


def test_files_globs_and_lists_of_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(str(folder / "b.txt")) == "the lazy dog. "
    assert read(f"{folder}/**/*.md") == "the quick fox. "[:14]
    assert read(f"{folder}/sub/a.md, {folder}/*.txt,{folder}/b.txt") == "the quick fox. the lazy dog. "[:28]
    assert read(f"{folder}/s*") == "the quick fox. "[:14]
    monkeypatch.chdir(folder)
    assert read("b.txt") == "the lazy dog. "


def test_a_name_that_exists_is_taken_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a,b [1].txt").write_text("as it stands")
    assert read(str(tmp_path / "a,b [1].txt")) == "as it stands"


def test_the_check_before_a_run_knows_the_same_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker would find is not refused: a home folder in a pattern, a comma in a name, a list of many files."""
    (folder / "a,b.txt").write_text("a comma in its name")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    many = ",".join(["b.txt"] * 100)
    for path in ("~/*.txt", "~/sub", "a,b.txt", "b.txt, ", many):
        TextConfig(path=path).check()
        assert find_files(path)
    for path in ("~/*.md", "b.txt,nothing.txt", "x" * 300, "", ","):
        with pytest.raises(RequestError, match=r"^data\.path"):
            TextConfig(path=path).check()
        with pytest.raises(RequestError, match=r"^data\.path"):
            find_files(path)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("missing.txt", ("data.path=missing.txt", "no such file or folder", "looked in")),
        ("*.nothing", ("data.path=*.nothing", "matches no file")),
        ("hollow", ("data.path=hollow: the folder holds no file",)),
        ("/dev/null", ("data.path=/dev/null: is neither a regular file nor a folder",)),
        ("empty", ("data.path=empty", "nothing in it")),
        ("short", ("data.path=short", "5 tokens", "data.seq_len=64")),
        ("", ("data.path is not set",)),
        ("???", ("data.path is not set",)),
    ],
)
def test_paths_that_cannot_work_say_so(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as error:
        load(TextConfig(path=path, seq_len=64))
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("path", ["hollow", "/dev/null"])
def test_what_holds_no_text_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "hollow" / "deep").mkdir(parents=True)
    (tmp_path / "hollow" / ".hidden").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=f"^data.path={path}: "):
        TextConfig(path=path).check()
    (tmp_path / "hollow" / "deep" / "a.txt").write_text("text")
    TextConfig(path="hollow").check()


def test_a_folder_is_walked_once_and_before_a_run_only_to_its_first_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    assert len(find_files(str(folder))) == 3
    assert listed == ["my texts", "sub"]
    listed.clear()
    TextConfig(path=str(folder)).check()
    assert listed == ["my texts"]


def test_the_fingerprint_follows_the_content(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "text"
    prints = []
    for text in ("one text of some length", "two text of some length", "one text of some length"):
        path.write_text(text)
        prints.append(load(TextConfig(path=str(path), seq_len=4)).fingerprint)
    assert prints[0] == prints[2] != prints[1]


def test_a_tokenizer_file_encodes_whole_documents_and_ends_them(folder: Path, tokenizer_file: Path, load: Load) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    cfg = TextConfig(path=str(folder), tokenizer=str(tokenizer_file), seq_len=2)
    end = tokenizer.token_to_id("<|endoftext|>")
    text = tokenizer.decode(ids(cfg), skip_special_tokens=False)
    assert text.startswith("the lazy dog. <|endoftext|><|endoftext|>the quick fox.")
    assert ids(cfg).count(end or 0) >= 2
    assert len(ids(cfg)) < len("the lazy dog. the quick fox. "), "merges make fewer tokens than bytes"
    assert load(cfg).vocab_size == tokenizer.get_vocab_size()


def test_a_transformers_folder_gives_the_same_tokens(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    saved = tmp_path / "saved"
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="<|endoftext|>").save_pretrained(saved)
    from_file = ids(TextConfig(path=str(folder), tokenizer=str(tokenizer_file), seq_len=2))
    assert ids(TextConfig(path=str(folder), tokenizer=str(saved), seq_len=2)) == from_file


def test_tokenizers_that_cannot_be_loaded_say_so(load: Load, folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    cases = ((tmp_path / "none", "no such folder or file"), (broken, "not a tok"), (folder, "not a tok"))
    for tokenizer, part in cases:
        with pytest.raises(RequestError) as error:
            load(TextConfig(path=str(folder), tokenizer=str(tokenizer), seq_len=2))
        assert f"data.tokenizer={tokenizer}: {part}" in str(error.value)


def test_a_file_that_is_no_text_is_named(load: Load, tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG" * 20)
    load(TextConfig(path=str(tmp_path), seq_len=2))
    with pytest.raises(RequestError, match=r"image.png: no UTF-8 text at byte 0"):
        load(TextConfig(path=str(tmp_path), tokenizer=str(tokenizer_file), seq_len=2))
