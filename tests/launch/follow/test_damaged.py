"""Run folders in which something else is where a file should be: the commands say so, and go on with other runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.follow.cancel import cancel
from ortlaunch.follow.jobs import jobs
from ortlaunch.follow.logs import logs
from ortlaunch.follow.status import status
from ortlaunch.follow.sync import sync_main

_SECONDS = 30
HUGE = "9" * 400


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def text(content: str) -> Callable[[Path], None]:
    """Writes this content."""

    def write(path: Path) -> None:
        path.write_text(content)

    return write


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ANYTHING = {
    "fifo": fifo,
    "folder": folder,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "nested": text("[" * 100_000),
    "sparse": sparse,
    "number": text(HUGE),
}
FILES = ("config.yaml", "journal.jsonl", "job.json", "launcher.json", "stopped.json")
OF_A_KIND = [
    ("job.json", '{"job_id": "--user=root"}'),
    ("job.json", '{"job_id": ["1"]}'),
    ("job.json", '{"job_id": "1\\n#SBATCH --output=/tmp/x"}'),
    ("launcher.json", '{"host": "x", "pid": -1, "start_ticks": 1}'),
    ("launcher.json", f'{{"host": "x", "pid": {HUGE}, "start_ticks": 1}}'),
    ("stopped.json", f'{{"step": {HUGE}}}'),
]


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    """A command that waits for a file is ended."""

    def end(*_: object) -> None:
        raise AssertionError("the command waits")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def damage(run_dir: Path, name: str, plant: Callable[[Path], object]) -> Path:
    """Puts something else in the place of a file."""
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    plant(path)
    return path


def check_readers(run_dir: Path, other: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls every command that reads run folders."""
    jobs(["--json"])
    said = capsys.readouterr()
    rows = {row["run_dir"]: row["state"] for row in json.loads(said.out)}
    assert rows[str(other)] == "finished" and str(run_dir) in rows
    assert f"ortlaunch: {path} cannot be read: " in said.err
    jobs([])
    assert str(path) in capsys.readouterr().err, "damage is told again"
    assert status([str(run_dir)]) == 0
    assert str(run_dir) in capsys.readouterr().out
    assert cancel([str(run_dir)]) == 0
    try:
        assert logs([str(run_dir)]) == 0
    except RequestError as error:
        assert str(error).startswith(f"{run_dir.name[-6:]} has no log of a worker yet; it is ")
    capsys.readouterr()


@pytest.mark.parametrize("kind", ANYTHING)
@pytest.mark.parametrize("name", FILES)
def test_whatever_is_in_the_place_of_a_file(make_run, capsys, name: str, kind: str) -> None:
    run_dir, other = make_run("damaged"), make_run("other")
    check_readers(run_dir, other, damage(run_dir, name, ANYTHING[kind]), capsys)


@pytest.mark.parametrize(("name", "content"), OF_A_KIND)
def test_odd_values(make_run, capsys, name: str, content: str) -> None:
    run_dir, other = make_run("damaged"), make_run("other")
    check_readers(run_dir, other, damage(run_dir, name, text(content)), capsys)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("health/rank-0.json", '{"host": "x", "pid": "x", "time": "x", "step": []}'),
        ("health/rank-0.json", f'{{"host": "{os.uname().nodename}", "pid": [1], "time": 1e999, "step": {HUGE}}}'),
        ("sweep.json", '{"folder": 1, "task": "x"}'),
        ("sweep.json", '{"runs": 5}'),
        ("relay.json", '{"mlflow_run_id": [1]}'),
        ("claims/1", '{"host": "x", "pid": "x", "job": "--user=root"}'),
        ("claims/" + "9" * 200, "[]"),
        ("journal.jsonl", '{"event": "tags", "t": 1, "values": {"slurm.restart_count": "x"}}\n'),
        ("journal.jsonl", f'{{"event": "params", "t": 1, "values": {{"train.steps": "{HUGE}"}}}}\n'),
        ("config.yaml", f"train: {{steps: {HUGE}}}\nlauncher: {{grace_seconds: [1]}}\n"),
        ("config.yaml", "launcher: {grace_seconds: .inf}\n"),
    ],
)
def test_odd_values_that_are_left_out(make_run, capsys, name: str, content: str) -> None:
    run_dir, other = make_run("damaged", end=None), make_run("other")
    damage(run_dir, name, text(content))
    jobs(["--json", "--all"])
    rows = {row["run_dir"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert rows[str(other)] == "finished" and str(run_dir) in rows
    jobs([])
    for verb in (status, cancel):
        try:
            verb([str(run_dir)])
        except RequestError as error:
            assert "is a sweep" in str(error), error


def test_logs_name_the_file_that_cannot_be_read(make_run, capsys) -> None:
    run_dir = make_run("damaged")
    damage(run_dir, "logs/rank-0.log", fifo)
    with pytest.raises(RequestError, match=r"logs/rank-0.log cannot be read: it is a FIFO and no plain file"):
        logs([str(run_dir), "--rank", "all"])


def test_sync_goes_on_with_the_other_runs(make_run, capsys) -> None:
    run_dir, other = make_run("damaged"), make_run("other")
    damage(run_dir, "config.yaml", fifo)
    assert sync_main(["--all", str(run_dir.parent)]) == 1
    said = capsys.readouterr()
    assert f"ortlaunch: {run_dir}/config.yaml cannot be read: it is a FIFO and no plain file" in said.err
    assert "left out: 1 run started without MLflow" in said.out and str(other) not in said.err
