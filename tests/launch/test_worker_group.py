"""torchrun's processes as one group: all of them end with it, and its end is noticed at once."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from ortlaunch.launch.local.workers import WorkerGroup
from ortlaunch.launch.plan import Start
from ortlaunch.run.identity import has_ended
from tests.support.waiting import until


def group_of(folder: Path, script: str) -> WorkerGroup:
    return WorkerGroup(Start(["sh", "-c", script], {}), folder / "log", 0.0)


def first_line(group: WorkerGroup) -> str:
    return until(lambda: next(group.lines(), ""))


def test_what_a_killed_torchrun_leaves_is_ended(tmp_path: Path) -> None:
    group = group_of(tmp_path, "sh -c 'sleep 600 & echo $!; wait'; true")
    left = psutil.Process(int(first_line(group)))
    assert group.poll() is None
    group._process.kill()
    group._process.wait()
    assert left.is_running()
    group.kill()
    until(lambda: has_ended(left.pid) or not left.is_running())


def test_its_end_cuts_the_wait_short(tmp_path: Path) -> None:
    group, begun = group_of(tmp_path, "exit 3"), time.monotonic()
    group.wait(600)
    while group.poll() is None:
        group.wait(600)
    assert group.poll() == 3
    assert group._process.stdout is not None and group._process.stdout.closed, "PYTHONWARNINGS=error would say so"
    assert time.monotonic() - begun < 200


def test_what_has_left_its_session_is_ended_and_a_neighbour_is_not(tmp_path: Path) -> None:
    other = group_of(tmp_path, "echo up; sleep 600")
    assert first_line(other) == "up"
    group = group_of(tmp_path, "setsid -f sh -c 'echo $$; exec sleep 600'")
    left = psutil.Process(int(first_line(group)))
    assert until(lambda: group.poll() == 0) and left.is_running()
    group.kill()
    until(lambda: has_ended(left.pid) or not left.is_running())
    assert other.poll() is None
    other.kill()
