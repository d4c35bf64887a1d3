"""What is read from a folder that others may have written: it is bounded, never waited for, and its damage is told."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import (
    is_inside,
    load_json,
    noticing,
    open_plain,
    read_bytes,
    read_json,
    read_tail,
    read_text,
)
from ortlaunch.run import failure, manifest, sweep
from ortlaunch.run.events import decode
from ortlaunch.run.journal import iterate, read_chunk
from ortlaunch.run.run import Run, runs_below
from ortlaunch.run.settings import read_settings
from ortlaunch.run.state import RunState, number


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_reader_of_a_record_that_is_written_again_sees_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    replace_text(path, "old")
    with path.open() as reader:
        replace_text(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["config.yaml"]


def test_threads_that_write_one_file_at_once_replace_it_by_whole_ones(tmp_path: Path) -> None:
    """As two requests to the service do that find the same index of runs out of date."""
    path, contents = tmp_path / "index.json", [name * 200_000 for name in "ab"]
    begin, seen = threading.Barrier(3), set()

    def write(content: str) -> None:
        begin.wait()
        for _ in range(50):
            replace_text(path, content)

    path.write_text(contents[0])
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, content) for content in contents]
        begin.wait()
        while not all(one.done() for one in writers):
            seen.add(path.read_text())
        for one in writers:
            one.result()
    assert seen <= set(contents) and [one.name for one in tmp_path.iterdir()] == ["index.json"]


def test_folders_that_go_while_runs_are_looked_for_are_passed_over(tmp_path: Path) -> None:
    """As old checkpoints do while a run trains."""
    for name in ("a", "b", "c"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "journal.jsonl").touch()
    found = runs_below(tmp_path)
    first = next(found).path
    others = [path for path in tmp_path.iterdir() if path != first]
    for path in (first / "checkpoints", others[0]):
        shutil.rmtree(path)
    assert [run.path for run in found] == others[1:]


def test_a_fifo_is_not_waited_for(fifo: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a FIFO and no plain file"):
        open_plain(fifo)
    for path, kind in ((tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(OSError, match=f"it is {kind} and no plain file"):
            read_bytes(path)


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it is larger than 1,000 bytes"):
        read_bytes(path, 1000)
    assert read_tail(path, 10) == "\0" * 10


@pytest.mark.parametrize("follow", [True, False])
def test_a_link_is_followed_only_where_it_may_be(tmp_path: Path, follow: bool) -> None:
    (tmp_path / "file").write_text("content")
    link = tmp_path / "link"
    link.symlink_to("file")
    assert read_text(tmp_path / "file", follow=follow) == "content"
    if follow:
        assert read_text(link) == "content"
    else:
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            read_text(link, follow=False)


def test_a_request_to_stop_is_a_small_file_of_its_own(tmp_path: Path) -> None:
    """A link of another user could lead to a file that only the reader may read, and others see the word."""
    run = Run(tmp_path)
    run.stop_file.write_text("cancel " + "x" * 4000)
    assert run.stop_word() == "cancel"
    run.stop_file.write_text("cancel " + "x" * 5000)
    with noticing() as damage:
        assert run.stop_word() is None
    assert [str(one) for one in damage] == [f"{run.stop_file} cannot be read: it is larger than 4,096 bytes"]
    (tmp_path / "private").write_text("password")
    run.stop_file.unlink()
    run.stop_file.symlink_to("private")
    with noticing() as damage:
        assert run.stop_word() is None
    assert [one.path for one in damage] == [run.stop_file] and "password" not in str(damage)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ("7" * 10_000, "Exceeds the limit"),
        ("[1]", "it holds no JSON object"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_is_none_is_told(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with noticing() as damage:
        assert read_json(path) is None
        assert read_json(tmp_path / "missing.json") is None
    assert [one.path for one in damage] == [path] and why in damage[0].why
    assert read_json(path) is None  # Nobody collects.


def test_json_raises_only_what_readers_expect(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("- " * 100_000, "nested too deeply"),
        ("a:\n" + "".join(f"{' ' * depth}a:\n" for depth in range(1, 400)), "nested too deeply"),
        ("a: &a [1]\nb: [*a, *a]", "it has aliases"),
        ("a: &-a [1]\nb: [*-a, *-a]", "it has aliases"),
        ('{"a": &a [1], "b":*a}', "it has aliases"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("x: " + "y" * (5 << 20), "larger than"),
        ("a: \xff", "cannot be read"),
    ],
)
def test_a_configuration_ends_no_process(tmp_path: Path, text: str, why: str) -> None:
    """libyaml's loader overflows the stack on text that is nested deeply."""
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequestError, match=f"config.yaml cannot be read: .*{why}|{why}"):
        read_settings(path)
    path.rename(tmp_path / "overrides.yaml")
    path.mkdir()
    with noticing() as damage:
        assert Run(tmp_path).setting("train.steps") is None
        assert Run(tmp_path).words() == []
    assert [one.path for one in damage] == [path, tmp_path / "overrides.yaml"]


def test_brackets_and_stars_of_a_usual_configuration_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("globs: '*.txt'\nlist: [" + ", ".join(["[1]"] * 200) + "]\nother: '- - *x'\n")
    assert read_settings(path)["globs"] == "*.txt"


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "metrics", "t": 1, "step": 1, "values": {"a": 1' + "0" * 400 + "}}",
        '{"event": "end", "t": 1' + "0" * 30 + ', "status": "FINISHED"}',
        '{"event": "end", "t": -1, "status": "FINISHED"}',
        '{"event": "metrics", "t": 1, "step": 1' + "0" * 30 + ', "values": {}}',
        "[" * 100_000,
    ],
)
def test_a_line_with_odd_numbers_is_no_event(line: str) -> None:
    assert decode(line.encode()) is None


def test_a_number_of_thousands_of_digits_is_none() -> None:
    assert number("9" * 5000) is None and number("12") == 12
    state = RunState()
    for event in [decode(b'{"event": "params", "t": 1, "values": {"train.steps": "' + b"9" * 5000 + b'"}}')]:
        assert event is not None
        state.take(event)
    assert state.steps is None


def test_a_journal_is_read_up_to_a_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "end", "t": 1, "status": "FINISHED"}\n')
    with path.open("ab") as file:
        file.truncate(1 << 40)
    with noticing() as damage:
        assert len(list(iterate(path))) == 1
        assert len(read_chunk(path, 0).events) == 1
    assert [one.path for one in damage] == [path] and "a line of more than" in damage[0].why


def test_a_fifo_is_no_journal(fifo: Path) -> None:
    with pytest.raises(OSError, match="FIFO"):
        read_chunk(fifo, 0)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", ""])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    """Files that a manifest names are read, and removed with an old checkpoint."""
    assert not is_inside(name)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    entry = {"size": 0, "sha256": ""}
    (folder / "manifest.json").write_text(
        f'{{"format": 1, "files": {{"{name}": {str(entry).replace(chr(39), chr(34))}}}}}'
    )
    assert manifest.listed(folder) == []
    assert manifest.problems(folder) == ["manifest.json is missing or cannot be read"]


def test_a_fifo_in_a_checkpoint_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    manifest.seal(tmp_path)
    (tmp_path / "weights").unlink()
    os.mkfifo(tmp_path / "weights")
    assert manifest.problems(tmp_path) == ["weights: it is a FIFO and no plain file"]


def test_a_damaged_failure_hides_no_other(tmp_path: Path) -> None:
    failure.record(tmp_path, 3, ValueError("the cause"))
    for rank, content in enumerate(['{"rank": 1}', "[]", "{"]):
        (tmp_path / "failures" / f"rank-{rank}.json").write_text(content)
    found = failure.first(tmp_path)
    assert found is not None and found.rank == 3 and "the cause" in found.message
    assert not failure.is_request(tmp_path)


def test_a_link_under_the_name_of_an_unfinished_file_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f".job.json.{bytes(4).hex()}").symlink_to(precious)
    replace_text(tmp_path / "job.json", "{}")
    assert precious.read_text() == "kept" and (tmp_path / "job.json").read_text() == "{}"
    assert not (tmp_path / "job.json").is_symlink()


@pytest.mark.parametrize(
    "content", ['{"folder": 1, "task": 0}', '{"folder": "/x"}', '{"folder": "a\\u0000b", "task": 1}', "[]"]
)
def test_a_place_in_a_sweep_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with noticing() as damage:
        assert sweep.task_of(tmp_path) is None and sweep.note_end(tmp_path, "FINISHED") is None
    assert [one.path.name for one in damage] == ["sweep.json"]
