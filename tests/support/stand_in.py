"""The launcher with a worker that trains nothing: it journals steps, and stops as a worker does. A second each.

``python -m tests.support.stand_in STEPS FAULT KEY=VALUE...`` is ``ortlaunch KEY=VALUE...`` with that worker. FAULT is
the name of a function of this module that disturbs the launcher; ``none`` disturbs nothing.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ortlaunch import cli
from ortlaunch.launch import outages
from ortlaunch.launch.local import launcher, run
from ortlaunch.launch.plan import NodePart, Start
from ortlaunch.run.identity import has_open
from ortlaunch.run.run import Run
from tests.support.environment import environment

_PATIENCE = 50.0
KEYS = ("model=mlp", "backend=eager", "trainer=single", "train.steps=1000")
"""Keys of a run that needs no torch to be planned."""

_WORKER = """
import sys, time
from pathlib import Path
from ortlaunch.run.run import Run, Stopped
run = Run(Path(sys.argv[1]))
journal = run.journal(is_patient=True)
journal.metrics(1, {"startup/time_to_first_step_seconds": 0.1})
for step in range(1, int(sys.argv[2]) + 1):
    journal.metrics(step, {"train/loss": 1.0 / step})
    print(f"printed at step {step}", flush=True)
    time.sleep(0.05)
    if run.stop_word() is not None:
        run.note_stopped(Stopped(step, "", ""))
        sys.exit(0)
run.note_done(int(sys.argv[2]))
"""


def start(cwd: Path, steps: int, fault: str, *keys: str, prefix: tuple[str, ...] = (), **options) -> subprocess.Popen:
    """Starts the launcher in a folder, in a session of its own; `options` are those of Popen."""
    words = keys if keys[:1] == ("resume",) else (*KEYS, *keys)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.support.stand_in", str(steps), fault, *words],
        cwd=cwd,
        env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def wait_for_line(process: subprocess.Popen, text: str) -> str:
    """Reads standard output up to a line with this text; returns what was read."""
    seen = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    pytest.fail(f"no {text!r} in {''.join(seen)}{process.stderr and process.stderr.read()}")


def none() -> None:
    """Disturbs nothing."""


class _Flag(run.StopFlag):
    """The launcher's flag, which this module can look at."""

    latest_one: run.StopFlag

    def __init__(self) -> None:
        super().__init__()
        _Flag.latest_one = self


def _wait_for_a_request() -> None:
    """Waits until the launcher was asked to stop, however late the test comes to that."""
    deadline = time.monotonic() + _PATIENCE
    while not _Flag.latest_one.count and time.monotonic() < deadline:
        time.sleep(0.01)


def slow_start() -> None:
    """The start takes until the launcher is asked to stop, as where git or the disk is slow; it says when it begins."""
    write = run.write_run_folder

    def slowly(*arguments) -> None:
        print("starting", flush=True)
        _wait_for_a_request()
        write(*arguments)

    run.write_run_folder, run.StopFlag = slowly, _Flag


def hanging_start() -> None:
    """The start hangs, and says when it begins and when the launcher was asked to stop."""

    def hangs(*_) -> None:
        print("starting", flush=True)
        _wait_for_a_request()
        print("asked", flush=True)
        time.sleep(_PATIENCE)

    run.write_run_folder, run.StopFlag = hangs, _Flag


def tells_of_its_journal() -> None:
    """The launcher says whether its journal is open before it tells others of itself."""
    note = Run.note_launcher

    def telling(files: Run) -> None:
        print("journal open:", has_open(os.getpid(), files.journal_file), flush=True)
        note(files)

    Run.note_launcher = telling


def late_watch() -> None:
    """The launcher is so slow that it begins to watch when the worker is done already."""
    start = run.Display.start

    def late(display: run.Display) -> None:
        start(display)
        deadline = time.monotonic() + _PATIENCE
        while not display._plan.files.is_done() and time.monotonic() < deadline:
            time.sleep(0.01)

    run.Display.start = late


def journal_full_at_the_end() -> None:
    """When the workers have ended, the launcher can make no file longer: a write fails as on a full disk."""
    watch = run._watch

    def then_full(group, stop, plan, *rest) -> int:
        code = watch(group, stop, plan, *rest)
        limit = plan.journal.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return code

    run._watch = then_full


def full_at_the_start() -> None:
    """The launcher can write no file at all."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def nearly_full_at_the_start() -> None:
    """The launcher can claim the run, but not describe it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def says_when_it_sends() -> None:
    """The launcher says when it begins to wait for the trackers."""
    send = run._Attempt._send_the_rest

    def telling(*arguments):
        print("sending", flush=True)
        return send(*arguments)

    run._Attempt._send_the_rest = telling


def tells_outages_soon() -> None:
    """The launcher reports a tracker that is away after half a second."""
    outages._AWAY_SECONDS, outages._LOOK_SECONDS = 0.5, 0.2


def journal_stale() -> None:
    """Every other look at the journal is answered as by NFS for a file that its server has just replaced."""
    read, looks = run.read_events, itertools.count()

    def stale(path: Path, offset: int):
        if next(looks) % 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, offset)

    run.read_events = stale


def slow_summary() -> None:
    """The launcher prints its last lines only after a request to stop, and says when it begins."""
    summary = run.Display.summary

    def slowly(*arguments) -> None:
        print("summing up", flush=True)
        _wait_for_a_request()
        summary(*arguments)

    run.Display.summary, run.StopFlag = slowly, _Flag


def main() -> None:
    """Runs the command."""
    _, steps, fault, *words = sys.argv
    command = [sys.executable, "-c", _WORKER]
    launcher.node_part = lambda plan: NodePart(plan, 0, 1, Start([*command, str(plan.run_dir), steps]))
    globals()[fault]()
    sys.argv = ["ortlaunch", *words]
    cli.main()


if __name__ == "__main__":
    main()
