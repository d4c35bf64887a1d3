"""One launcher at a time writes a run, on file systems without locks and across machines too."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.run import claim
from ortlaunch.run.identity import Process, start_ticks
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from tests.support.waiting import until

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
            racer.communicate("end\n", timeout=120)


def of(run: Run, process: Process) -> None:
    """Makes the newest claim that of another process."""
    path = max(run.claims.iterdir(), key=lambda one: int(one.name))
    path.write_text(json.dumps(asdict(process)))


@pytest.fixture
def another() -> Process:
    """A process of this machine that lives."""
    return replace(Process.this(), pid=os.getppid(), start_ticks=start_ticks(os.getppid()))


def test_a_released_run_and_one_whose_owner_is_gone_can_be_taken(run: Run, another: Process) -> None:
    first = claim.take(run)
    of(run, another)
    with pytest.raises(RequestError, match=rf"still running \(process {os.getppid()}\)"):
        claim.take(run)
    of(run, Process.this())
    first.release()
    claim.take(run)
    of(run, replace(another, start_ticks=1))
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
    assert found is not None and found.quiet_seconds < 500


def test_the_next_instance_of_a_job_takes_over_and_another_job_asks(run: Run) -> None:
    claim.take(run, job="7")
    claim.take(run, job="7")
    with pytest.raises(RequestError, match="belongs to job 7"):
        claim.take(run, job="8", job_is_over=lambda job: job != "7")
    claim.take(run, job="8", job_is_over=lambda job: job == "7")


def test_a_process_that_has_the_run_has_it_still_when_it_asks_again(run: Run) -> None:
    """`resume` claims the run before the launcher does."""
    first = claim.take(run)
    claim.take(run)
    assert [path.name for path in run.claims.iterdir()] == ["1"]
    first.release()
    claim.take(run)
    assert claim.number(run) == 2


def test_what_was_launched_and_has_ended_meanwhile_is_not_launched_on_old_knowledge(run: Run) -> None:
    known = claim.number(run)
    claim.take(run).release()
    with pytest.raises(RequestError, match=r"was launched by another process meanwhile: ortlaunch status"):
        claim.take(run, after=known)
    claim.take(run, after=claim.number(run))


def test_a_claim_that_was_handed_over_is_the_queued_job_s(run: Run) -> None:
    """The command that has submitted the job ends; the scheduler says when the run is free."""
    mine = claim.take(run)
    claim.hand_over(run, "7")
    mine.release()
    with pytest.raises(RequestError, match="belongs to job 7, which is not over: cancel it first"):
        claim.take(run)
    claim.take(run, job="7")
    claim.release_of(run, "7")
    claim.take(run)


def test_only_the_owner_hands_a_claim_over_or_releases_it(run: Run, another: Process) -> None:
    claim.take(run)
    of(run, another)
    before = (run.claims / "1").read_text()
    claim.hand_over(run, "7")
    claim.release(run)
    assert (run.claims / "1").read_text() == before


def test_a_process_of_another_container_with_this_host_s_name_is_not_looked_for_here(
    run: Run, another: Process
) -> None:
    """Its id means another process here, or none. Only the renewals tell whether it lives."""
    claim.take(run)
    of(run, replace(another, pid=2**22 + 1, machine="another boot or namespace"))
    with pytest.raises(RequestError, match="gave a sign"):
        claim.take(run)
    os.utime(run.claims / "1", (time.time() - 100, time.time() - 100))
    claim.take(run)


def test_a_claim_that_was_renewed_before_the_clock_was_set_back_lapses(run: Run) -> None:
    claim.take(run)
    elsewhere(run, -3600.0)
    claim.take(run)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_claim_that_cannot_be_written_leaves_nothing(run: Run) -> None:
    with pytest.raises(OSError, match="File too large"), full_disk():
        claim.take(run)
    assert list(run.claims.iterdir()) == []


def test_a_claim_is_renewed_through_work_that_takes_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.02)
    mine = claim.take(run)
    old = time.time() - 1000
    os.utime(run.claims / "1", (old, old))
    with mine.kept():
        until(lambda: (run.claims / "1").stat().st_mtime > old + 500)


@pytest.mark.parametrize(
    ("end", "is_believed"),
    [
        ({"status": "FAILED", "t": 1700000000000}, True),
        ({"status": "FAILED", "t": 10**40}, False),
        ({"status": "FAILED", "t": True}, False),
        ({"status": ["FAILED"], "t": 1}, False),
        (7, False),
    ],
)
def test_a_damaged_end_that_a_claim_keeps_is_no_end(run: Run, end: object, is_believed: bool) -> None:
    with Journal(run.journal_file) as journal:
        journal.start("default", "a", "a-1")
    run.claims.mkdir(exist_ok=True)
    (run.claims / "1").write_text(json.dumps({"released": True, "end": end}))
    state = run.state()
    assert (state.ended, state.ended_at) == (("FAILED", 1700000000000) if is_believed else (None, None))


def test_a_worker_that_is_started_again_keeps_to_its_launcher_s_claim(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts workers again also after another launcher has taken the run over."""
    (variable,) = claim.take(run).environment().items()
    assert claim.own_number(run) == 1
    (run.claims / "2").touch()
    assert claim.own_number(run) == 2, "nobody has said whose worker this is"
    monkeypatch.setenv(*variable)
    assert claim.own_number(run) == 1
    # A run that a worker launches inherits its variables.
    other = Run(run.path / "other")
    (other.path / "claims").mkdir(parents=True)
    (other.claims / "5").touch()
    assert claim.own_number(other) == 5
