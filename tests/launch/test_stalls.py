"""A worker that stands still while the others wait for it, as the launcher says it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ortlaunch.base.awake import AwakeClock, why_not_running
from ortlaunch.launch.stalls import Stalls
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run
from tests.support.fake_time import FakeTime


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.health.mkdir()
    with run.journal() as journal:
        journal.start("e", "n", "abc123")
    return run


class Scene:
    """A launcher that looks every second, and workers that give signs of life or do not."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._time = FakeTime()
        self._stalls = Stalls(run, AwakeClock(self._time))
        self._signs = 0

    def sign(self, rank: int, process: Process | None = None) -> None:
        process = process or Process("node1", 100 + rank, 0)
        beat = {"host": process.host, "pid": process.pid, "machine": process.machine, "step": 12}
        self.run.beat_file(rank).write_text(json.dumps(beat))
        self._signs += 1
        os.utime(self.run.beat_file(rank), ns=(self._signs, self._signs))

    def pass_seconds(self, seconds: int, *signing: int) -> list[str]:
        """What is said while time passes and only these workers give signs."""
        said = []
        for _ in range(seconds):
            self._time.seconds += 1.0
            for rank in signing:
                self.sign(rank)
            said += self._stalls.look()
        return said

    def stand(self, seconds: float) -> list[str]:
        """What is said when the launcher itself could not run."""
        self._time.seconds += seconds
        return self._stalls.look()


@pytest.fixture
def scene(run: Run) -> Scene:
    made = Scene(run)
    for rank in range(3):
        made.sign(rank)
    assert made.pass_seconds(10, 0, 1, 2) == []
    return made


def test_one_that_gives_no_signs_while_others_do_is_named_until_it_goes_on(scene: Scene) -> None:
    (line,) = scene.pass_seconds(40, 0, 2)
    assert line.startswith("ortlaunch: rank 1 on node1 (process 101): no sign of life since 20")
    assert line.endswith("after step 12. The other workers wait for it")
    assert scene.run.state().standing in line
    assert scene.pass_seconds(40, 0, 2) == [], "it is said once"
    (line,) = scene.pass_seconds(10, 0, 1, 2)
    assert line.startswith("ortlaunch: rank 1 goes on at 20")
    assert scene.run.state().standing == ""


def test_an_attempt_that_begins_or_ends_has_nobody_that_stands(scene: Scene) -> None:
    scene.pass_seconds(40, 0, 2)
    with scene.run.journal() as journal:
        assert scene.run.state().standing != ""
        journal.start("e", "n", "abc123")
        assert scene.run.state().standing == ""


def test_all_of_them_at_once_are_busy_and_one_that_has_ended_is_not_missed(scene: Scene) -> None:
    """A graph that all workers export, and a worker that has left before the others."""
    assert scene.pass_seconds(100) == []
    scene.pass_seconds(10, 0, 1, 2)
    scene.run.beat_file(1).unlink()
    assert scene.pass_seconds(100, 0, 2) == []


def test_a_launcher_that_stood_still_itself_blames_nobody(scene: Scene) -> None:
    (line,) = scene.stand(1000.0)
    assert line.startswith("ortlaunch: this command could not run for 998 s, until 20")
    assert scene.pass_seconds(40, 0, 1, 2) == []


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def stop(sleeping: subprocess.Popen[bytes]) -> Callable[[], None]:
    def act() -> None:
        sleeping.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeping.pid, os.WSTOPPED)

    return act


def test_one_that_was_stopped_on_this_machine_is_named_soon_and_with_the_cause(
    scene: Scene, sleeping: subprocess.Popen[bytes], stop: Callable[[], None]
) -> None:
    this = Process.this()
    scene.sign(1, Process(this.host, sleeping.pid, 0, this.machine))
    assert scene.pass_seconds(8) == [], "it runs"
    stop()
    (line,) = scene.pass_seconds(4)
    assert "it was stopped by a signal (SIGSTOP" in line and f"(process {sleeping.pid})" in line


def test_why_a_process_does_not_run(sleeping: subprocess.Popen[bytes], stop: Callable[[], None]) -> None:
    assert why_not_running(sleeping.pid) == ""
    stop()
    assert "SIGSTOP" in why_not_running(sleeping.pid)
    sleeping.kill()
    sleeping.wait()
    assert why_not_running(sleeping.pid) == ""


def test_time_in_which_the_process_could_not_run_does_not_count() -> None:
    time = FakeTime()
    clock = AwakeClock(time)
    time.seconds += 0.5
    assert clock.tick() == 0.0
    time.seconds += 1000.0
    assert clock.tick() == 998.0
    assert clock.seconds == 2.5


def test_one_that_goes_on_and_ends_at_once_is_told(scene: Scene) -> None:
    (line,) = scene.pass_seconds(40, 0, 2)
    scene.run.beat_file(1).unlink()
    (line,) = scene.pass_seconds(1, 0, 2)
    assert line.startswith("ortlaunch: rank 1 goes on at 20")
    assert scene.run.state().standing == ""
