"""Whether a run goes on: here, on another machine, and where locks hold nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ortlaunch.base.locks import exclusive
from ortlaunch.run import claim
from ortlaunch.run.identity import Process
from ortlaunch.run.liveness import SILENT_SECONDS, Alive, has_workers, liveness
from ortlaunch.run.run import Run

THERE = {"host": "elsewhere", "pid": 1, "start_ticks": 1}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    with run.journal() as journal:
        journal.start("e", "n", "abc123")
    return run


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_a_launcher_on_this_machine_is_asked_for_by_its_process(run: Run) -> None:
    run.note_launcher()
    assert liveness(run).alive is Alive.LAUNCHER
    gone = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": 1}
    run.launcher_file.write_text(json.dumps(gone))
    run.workers_lock.touch()
    assert liveness(run).alive is Alive.NOTHING


@pytest.mark.parametrize(
    ("quiet", "alive"), [(5.0, Alive.MAYBE), (SILENT_SECONDS + 5, Alive.NOTHING)], ids=["fresh", "silent"]
)
def test_a_launcher_of_an_older_release_elsewhere_is_judged_by_the_journal(
    run: Run, quiet: float, alive: Alive
) -> None:
    run.launcher_file.write_text(json.dumps(THERE))
    aged(run.journal_file, quiet)
    assert liveness(run).alive is alive


@pytest.mark.parametrize(
    ("age", "alive"), [(5.0, Alive.LAUNCHER), (claim.LAPSE_SECONDS + 5, Alive.NOTHING)], ids=["renewed", "lapsed"]
)
def test_a_launcher_elsewhere_is_judged_by_its_claim(run: Run, age: float, alive: Alive) -> None:
    run.launcher_file.write_text(json.dumps(THERE))
    claim.take(run)
    (run.claims / "1").write_text(json.dumps(THERE))
    aged(run.claims / "1", age)
    aged(run.journal_file, 1000)
    assert liveness(run).alive is alive


def test_a_suspended_launcher_elsewhere_is_not_gone_while_its_workers_give_signs(run: Run) -> None:
    run.launcher_file.write_text(json.dumps(THERE))
    claim.take(run)
    (run.claims / "1").write_text(json.dumps(THERE))
    aged(run.claims / "1", claim.LAPSE_SECONDS + 5)
    assert liveness(run).alive is Alive.MAYBE, "the journal was written a moment ago"
    aged(run.journal_file, claim.LAPSE_SECONDS + 5)
    assert liveness(run).alive is Alive.NOTHING


def test_a_worker_elsewhere_that_ended_in_order_is_no_worker_of_the_next_attempt(run: Run) -> None:
    run.health.mkdir()
    run.beat_file(0).write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": time.time() - 1.0}))
    assert has_workers(run)
    with run.journal() as journal:
        journal.end("KILLED")
        journal.start("e", "n", "abc123")
    assert not has_workers(run)


def test_another_who_asks_for_the_workers_is_no_worker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question takes their lock for a moment."""
    monkeypatch.setattr("ortlaunch.run.liveness._QUESTION_SECONDS", 60.0, raising=False)
    asking, answered = threading.Event(), threading.Event()

    def ask() -> None:
        with exclusive(run.workers_lock):
            asking.set()
            answered.wait(0.1)

    run.workers_lock.touch()
    other = threading.Thread(target=ask)
    other.start()
    asking.wait()
    assert not has_workers(run)
    answered.set()
    other.join()


def test_workers_are_found_without_a_lock_by_their_process(run: Run) -> None:
    """A worker that writes its sign of life on a file system where locks hold nothing."""
    run.health.mkdir()
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(run.path)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
        beat = {"host": Process.this().host, "pid": worker.pid, "time": time.time()}
        run.beat_file(0).write_text(json.dumps(beat))
        assert has_workers(run)
        link = run.path / "link"
        link.symlink_to(run.path)
        assert has_workers(Run(link))
        # The same number, and another program.
        run.beat_file(0).write_text(json.dumps(beat | {"pid": os.getpid()}))
        assert not has_workers(run)
    finally:
        worker.communicate(timeout=120)
    run.beat_file(0).write_text(json.dumps(beat))
    assert not has_workers(run)
