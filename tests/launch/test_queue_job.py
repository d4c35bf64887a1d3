"""What a job does after its workers have ended, without workers and without a scheduler."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base import exit_codes
from ortlaunch.config.schema import RunConfig
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.queue import job
from ortlaunch.launch.queue.own import OwnJob
from ortlaunch.launch.queue.verdict import Verdict


class Launcher:
    """Takes the place of a launcher with a scheduler."""

    name = title = "batch"
    warning = signal.SIGUSR2

    def __init__(self) -> None:
        self.takes_requeues = True
        self.requeues = 0

    def own_job(self) -> OwnJob:
        return OwnJob(self.name, "7", "n1", 0, {}, "7")

    def requeue(self, _: OwnJob) -> bool:
        self.requeues += 1
        return self.takes_requeues


class Attempts:
    """Takes the place of attempts: each ends with the signals that came in it, and a verdict."""

    def __init__(self, *attempts: tuple[list[str], Verdict]) -> None:
        self.left = list(attempts)

    def workers(self, _launcher: Any, _plan: Any, signals: Any) -> tuple[int, None]:
        signals.seen += self.left[0][0]
        return 0, None

    def decide(self, *_: Any) -> Verdict:
        return self.left.pop(0)[1]


AGAIN = Verdict("again", "the workers got SIGTERM, and the job goes on")
END = Verdict("end", "all steps are done", "FINISHED")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    for name, replacement in {"begin": lambda *_: 0, "gather": lambda *_: None, "refused": lambda *_: None}.items():
        monkeypatch.setattr(job, name, replacement)
    monkeypatch.setattr(job.output, "append_to", lambda *_: None)
    yield Launcher()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(launcher: Any, monkeypatch: pytest.MonkeyPatch, *attempts: tuple[list[str], Verdict]) -> tuple[int, int]:
    """Runs the job; returns its exit code and the number of attempts that it has not made."""
    planned = Attempts(*attempts)
    monkeypatch.setattr(job, "_workers", planned.workers)
    monkeypatch.setattr(job, "decide", planned.decide)
    plan = LaunchPlan(RunConfig(), Path("run"), "aaaaaa", "n", 1)
    return job.run_job(launcher, plan), len(planned.left)


def test_the_workers_start_again_until_the_run_is_over(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(launcher, monkeypatch, ([], AGAIN), ([], END)) == (exit_codes.DONE, 0)
    assert launcher.requeues == 0


@pytest.mark.parametrize(("takes", "code"), [(True, exit_codes.DONE), (False, exit_codes.FAILED)])
def test_a_job_that_was_warned_is_queued_again_instead(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, takes: bool, code: int
) -> None:
    launcher.takes_requeues = takes
    assert run(launcher, monkeypatch, (["WARNING"], AGAIN), ([], END)) == (code, 1)
    assert launcher.requeues == 1


def test_a_run_that_is_over_is_not_queued_again(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(launcher, monkeypatch, (["WARNING"], END)) == (exit_codes.DONE, 0)
    assert launcher.requeues == 0
