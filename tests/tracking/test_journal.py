"""The journal keeps what it was told, whatever happens to its writers."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import subprocess
import sys
import time
from enum import Enum
from pathlib import Path

import pytest

from ortlaunch.run.journal import read_chunk
from ortlaunch.tracking.journal import Journal, flatten, read_events
from tests.support.environment import environment


class Colour(Enum):
    red = "rot"


def test_every_event_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    (tmp_path / "config.yaml").touch()
    before = time.time_ns() // 1_000_000
    journal = Journal(path)
    journal.start("exp", "name ü", "ab12")
    journal.params({"model": {"name": "gpt2"}})
    journal.tags({"a": "b"})
    journal.metrics(3, {"train/loss": 1.5})
    journal.rewind(2, "resumed from checkpoints/step-00000002")
    journal.artifact(tmp_path / "config.yaml", "config")
    journal.failure(1, "node\n2", "boom")
    journal.end("FAILED")
    journal.close()
    events, offset = read_events(path, 0)
    after = time.time_ns() // 1_000_000
    times = [event.pop("t") for event in events]
    assert events == [
        {"event": "start", "experiment": "exp", "name": "name ü", "run_id": "ab12"},
        {"event": "params", "values": {"model.name": "gpt2"}},
        {"event": "tags", "values": {"a": "b"}},
        {"event": "metrics", "step": 3, "values": {"train/loss": 1.5}},
        {"event": "rewind", "step": 2, "reason": "resumed from checkpoints/step-00000002"},
        {"event": "artifact", "path": "config.yaml", "artifact_path": "config"},
        {"event": "failure", "rank": 1, "host": "node\n2", "message": "boom"},
        {"event": "end", "status": "FAILED"},
    ]
    assert before <= times[0] and times == sorted(times) and times[-1] <= after
    assert offset == path.stat().st_size and read_events(path, offset) == ([], offset)


def test_non_finite_values_survive_in_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).metrics(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    values = read_events(path, 0)[0][0]["values"]
    assert math.isnan(values["a"]) and (values["b"], values["c"], values["d"]) == (math.inf, -math.inf, 1.0)


def test_torn_last_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).tags({"a": "1"})
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[:10])
    events, offset = read_events(path, 0)
    assert len(events) == 1 and offset == len(whole)
    with path.open("ab") as file:
        file.write(whole[10:])
    assert [event["values"] for event in read_events(path, offset)[0]] == [{"a": "1"}]


def test_writer_after_a_torn_line_loses_nothing_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    early = Journal(path)
    early.tags({"a": "1"})
    with path.open("ab") as file:
        file.write(b'{"event": "metr')
    early.end("KILLED")
    chunk = read_chunk(path, 0)
    assert [event.kind for event in chunk.events] == ["tags", "end"] and len(chunk.corrupt) == 1


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "{}",
        "null",
        '{"event": "end"}',
        '{"event": "end", "t": 1, "status": "DONE"}',
        '{"event": "metrics", "t": 1, "step": 1, "values": {"a": "x"}}',
        '{"event": "metrics", "t": 1, "step": 9223372036854775808, "values": {}}',
        '{"event": "metrics", "t": 1.5, "step": 1, "values": {}}',
        '{"event": "params", "t": 1, "values": [1]}',
        '{"event": "start", "t": 1, "experiment": "e", "name": null, "run_id": "r"}',
        "\ufffd" * 3,
    ],
)
def test_corrupt_line_is_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.tags({"a": "1"})
    with path.open("ab") as file:
        file.write(line.encode() + b"\n\n")
    journal.tags({"b": "2"})
    with caplog.at_level(logging.WARNING):
        events, offset = read_events(path, 0)
    assert [event["values"] for event in events] == [{"a": "1"}, {"b": "2"}]
    assert offset == path.stat().st_size and len(caplog.records) == 1


def test_many_corrupt_lines_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"\xff\xfe\n" * 1000)
    assert read_events(path, 0) == ([], 3000)
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: skipped 1000 lines that are no journal events, the first at byte 0"


def test_chunks_end_at_lines_and_cover_everything(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in range(50):
        journal.metrics(step, {"a": step})
    steps, offset, chunks = [], 0, 0
    while (chunk := read_chunk(path, offset, 100)).offset > offset:
        steps += [event.step for event in chunk.events]
        offset, chunks = chunk.offset, chunks + 1
    assert steps == list(range(50)) and chunks > 20


def test_processes_writing_at_once_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = (
        "import sys; from pathlib import Path; from ortlaunch.run.journal import Journal\n"
        "j = Journal(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.readline()\n"
        "for step in range(2000): j.metrics(step, {sys.argv[2]: step, 'long' * 50: 1})"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], **pipes) for n in range(4)]
    # All at once: one of them alone would be done before the next has started.
    assert [writer.stdout.readline() for writer in writers] == [b"ready\n"] * 4
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0] * 4
    chunk = read_chunk(path, 0)
    assert len(chunk.events) == 8000 and not chunk.corrupt


def test_flatten_writes_what_a_user_would_type() -> None:
    nested = {
        "a": {"b": {"c": 1}, "none": None, "yes": True},
        "list": [1, None],
        "empty": {},
        "enum": Colour.red,
        "path": Path("x/y"),
        "uri": "http://user:geheim@host/x",
    }
    assert flatten(nested) == {
        "a.b.c": "1",
        "a.none": "null",
        "a.yes": "true",
        "list": "[1, null]",
        "empty": "{}",
        "enum": "rot",
        "path": "x/y",
        "uri": "http://user:***@host/x",
    }


def test_tracking_imports_mlflow_only_when_it_sends() -> None:
    code = (
        "import sys\n"
        "import ortlaunch.run.journal\n"
        "outside = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names\n"
        "assert not outside & {'omegaconf', 'yaml', 'mlflow', 'torch', 'numpy'}, outside\n"
        "import ortlaunch.tracking.relay, ortlaunch.follow.sync, ortlaunch.compare.command\n"
        "assert not {'mlflow', 'torch', 'transformers', 'sqlalchemy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_patient_journal_keeps_what_a_full_disk_does_not_take(tmp_path: Path) -> None:
    """In its order, whole, and without a torn line; the limit of the size does what a full disk does."""
    code = """
import resource, sys
from pathlib import Path
from ortlaunch.run.journal import Journal
journal = Journal(Path(sys.argv[1]), is_patient=True)
journal.metrics(1, {"a": 1})
full = journal.path.stat().st_size + 20
for limit in (full, full + 3, full + 100, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for step in range(3):
        journal.metrics(limit, {"a": step})
    print(bool(journal.problem), len(journal.unwritten))
"""
    path = tmp_path / "journal.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == ["True 3", "True 6", "True 8", "False 0"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["values"]["a"] for line in lines] == [1, *[0, 1, 2] * 4]


def test_after_another_writer_a_torn_line_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    patient, other = Journal(path, is_patient=True), Journal(path)
    write, full = os.write, OSError(errno.ENOSPC, "No space left on device")
    answers = iter([lambda fd, data: write(fd, data[:9])])

    def fills(fd: int, data: bytes) -> int:
        answer = next(answers, None)
        if answer is None:
            raise full
        return answer(fd, data)

    monkeypatch.setattr(os, "write", fills)
    patient.metrics(1, {"a": 1})
    assert patient.problem == "No space left on device"
    monkeypatch.setattr(os, "write", write)
    other.metrics(2, {"a": 2})
    patient.metrics(3, {"a": 3})
    events, _ = read_events(path, 0)
    assert [event["step"] for event in events] == [2, 1, 3] and patient.problem == ""
