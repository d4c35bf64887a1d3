"""One launcher at a time writes a run, on file systems without locks and across machines too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.run import claim
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run

RACER = """
import fcntl, os, sys
from pathlib import Path
def no_lock(*arguments):
    raise OSError("this file system has no locks")
fcntl.flock = fcntl.lockf = no_lock
from ortlaunch.base.errors import RequestError
from ortlaunch.run import claim
from ortlaunch.run.run import Run
opened = os.open
def open_late(path, *rest):
    # All of them have looked for the newest claim before the first of them creates the next one.
    if Path(path).parent.name == "claims" and rest[0] & os.O_CREAT:
        print("looked", flush=True)
        sys.stdin.readline()
    return opened(path, *rest)
os.open = open_late
try:
    claim.take(Run(Path(sys.argv[1])))
except RequestError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def elsewhere(run: Run, age: float) -> Path:
    """Makes the newest claim one of another machine, renewed so many seconds ago."""
    path = max(run.claims.iterdir(), key=lambda one: int(one.name))
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start_ticks": 1}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize("earlier", [0, 1], ids=["new", "after a dead one"])
def test_of_processes_that_try_at_once_one_has_the_run(run: Run, earlier: int) -> None:
    """Also where locks exclude nobody: here they raise, as on a file system that has none."""
    if earlier:
        run.claims.mkdir()
        (run.claims / "1").write_text(json.dumps({"host": Process.this().host, "pid": 2**22 + 1, "start_ticks": 1}))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        assert [racer.stdout.readline() for racer in racers] == ["looked\n"] * 4
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        assert sorted(racer.stdout.readline() for racer in racers) == ["refused\n"] * 3 + ["taken\n"]
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=30)


def test_a_released_run_and_one_whose_owner_is_gone_can_be_taken(run: Run) -> None:
    first = claim.take(run)
    with pytest.raises(RequestError, match=rf"still running \(process {os.getpid()}\)"):
        claim.take(run)
    first.release()
    claim.take(run)
    elsewhere(run, claim.LAPSE_SECONDS + 5)
    claim.take(run)


def test_a_launcher_on_another_machine_that_renews_keeps_the_run(run: Run) -> None:
    claim.take(run)
    elsewhere(run, 10)
    with pytest.raises(RequestError, match=r"still running on elsewhere \(process 1; it gave a sign \d+ s ago\)"):
        claim.take(run)


def test_an_owner_that_was_suspended_learns_that_it_has_lost_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.0)
    first = claim.take(run)
    assert first.keep()
    elsewhere(run, claim.LAPSE_SECONDS + 5)
    claim.take(run)
    assert not first.keep()
    before = sorted(path.read_text() for path in run.claims.iterdir())
    first.release()
    assert sorted(path.read_text() for path in run.claims.iterdir()) == before, "it released what was another's"


def test_a_file_system_that_does_not_answer_takes_no_run_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.0)
    mine = claim.take(run)
    away = run.claims.with_name("away")
    run.claims.rename(away)
    assert mine.keep()
    away.rename(run.claims)
    assert mine.keep()


def test_a_job_that_has_journalled_its_end_lets_the_next_one_begin(run: Run) -> None:
    claim.take(run, job="7")
    claim.release_of(run, "8")
    with pytest.raises(RequestError, match="belongs to job 7"):
        claim.take(run, job="8")
    claim.release_of(run, "7")
    claim.take(run, job="8")


def test_renewing_shows_life(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.0)
    mine = claim.take(run)
    old = time.time() - 1000
    os.utime(run.claims / "1", (old, old))
    assert mine.keep()
    found = claim.owner(run)
    assert found is not None and found.quiet_seconds < 5


def test_the_next_instance_of_a_job_takes_over_and_another_job_asks(run: Run) -> None:
    claim.take(run, job="7")
    claim.take(run, job="7")
    with pytest.raises(RequestError, match="belongs to job 7"):
        claim.take(run, job="8", job_is_over=lambda job: job != "7")
    claim.take(run, job="8", job_is_over=lambda job: job == "7")
