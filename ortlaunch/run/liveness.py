"""Determines whether a run that a local launcher started is still alive.

For a job, its scheduler answers this question.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ortlaunch.base.locks import exclusive
from ortlaunch.run import claim
from ortlaunch.run.identity import Process, has_ended, is_own, is_pid
from ortlaunch.run.run import Run

SILENT_SECONDS = 1800.0
"""A launcher of an older release on another machine counts as gone after this time without a sign of life."""
_FRESH_SECONDS = 30.0
"""For this long, a run without a launcher's file, or without the workers' lock, may be about to begin."""
_QUESTION_SECONDS = 0.2


class Alive(Enum):
    """The part of a run that is alive."""

    LAUNCHER = "launcher"
    WORKERS = "workers"
    """The launcher is gone, but its workers still run. They end by themselves."""
    MAYBE = "maybe"
    """This cannot be known: the run is on another machine and gave a sign of life recently, or it is about to begin."""
    NOTHING = "nothing"


@dataclass(frozen=True)
class Liveness:
    """Which part of a run is alive, and what that is known from."""

    alive: Alive
    launcher: Process | None
    quiet_seconds: float
    """Seconds since the last sign of life: a journal event, a worker's, or the claim's renewal on another machine."""


def liveness(run: Run, launcher: Process | None = None) -> Liveness:
    """Determines which part of a run is alive. It works on any machine that sees the run folder.

    Args:
        run: the run.
        launcher: the launcher's process, if the caller has read it already.
    """
    launcher = launcher or run.launcher()
    quiet = _quiet_seconds(run)
    if launcher is None:
        return Liveness(Alive.MAYBE if quiet < _FRESH_SECONDS else Alive.NOTHING, None, quiet)
    if launcher.is_here:
        return Liveness(_alive_here(run, launcher, quiet), launcher, quiet)
    holder = claim.owner(run)
    if holder is None or holder.process != launcher:
        return Liveness(Alive.MAYBE if quiet < SILENT_SECONDS else Alive.NOTHING, launcher, quiet)
    if not holder.is_gone():
        alive = Alive.LAUNCHER
    else:
        # The launcher may be suspended, or cut off from the file system. Its workers still give signs of life then.
        alive = Alive.MAYBE if quiet < claim.LAPSE_SECONDS and not holder.is_released else Alive.NOTHING
    return Liveness(alive, launcher, min(quiet, holder.quiet_seconds))


def _alive_here(run: Run, launcher: Process, quiet_seconds: float) -> Alive:
    if launcher.lives:
        return Alive.LAUNCHER
    if has_workers(run):
        return Alive.WORKERS
    # Workers that were started a moment ago have not yet taken their lock.
    is_early = not run.workers_lock.exists() and quiet_seconds < _FRESH_SECONDS
    return Alive.MAYBE if is_early else Alive.NOTHING


def has_workers(run: Run, wait_seconds: float = 0.0) -> bool:
    """Whether workers of a run are alive.

    Workers hold a lock while they live. Their signs of life are read too, because locks do not work on every file
    system. For a worker on this machine, the process counts. For one on another machine, the age of the file counts.

    Args:
        run: the run.
        wait_seconds: how long to wait for the workers to end.
    """
    deadline = time.monotonic() + wait_seconds
    while _have_lock(run, max(0.0, deadline - time.monotonic())) or _give_signs(run):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.2)
    return False


def _have_lock(run: Run, wait_seconds: float) -> bool:
    if not run.workers_lock.exists():
        return False
    # Others who ask at this moment hold the lock too, for as long as their question takes.
    with exclusive(run.workers_lock, max(wait_seconds, _QUESTION_SECONDS)) as free:
        return not free


def _give_signs(run: Run) -> bool:
    last_sign = 0.0
    for rank in run.beating_ranks():
        beat = run.beat(rank)
        pid = beat.get("pid")
        process = Process(str(beat.get("host")), pid if is_pid(pid) else 0, 0, str(beat.get("machine") or ""))
        if process.is_here:
            if is_worker_of(process.pid, run):
                return True
            continue
        with suppress(OSError):
            if _age(run.beat_file(rank)) < claim.LAPSE_SECONDS:
                last_sign = max(last_sign, _time(beat))
    # A sign of life that is older than the run's last end is from a worker that has ended normally. The journal may be
    # long, so it is read only if there is such a sign.
    return last_sign > 0 and last_sign > (run.state().last_end or 0)


def _time(beat: dict[str, Any]) -> float:
    """The time of a worker's sign of life, in milliseconds since the epoch."""
    said = beat.get("time")
    return 1000.0 * said if isinstance(said, float) else 0.0


def is_worker_of(pid: int, run: Run) -> bool:
    """Whether the process is a worker of this run. A later process may have been given the same id."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        # A worker that has become a script has another command.
        own = Path(f"/proc/{pid}/environ").read_bytes() if is_own(pid) else b""
    except OSError:
        return False
    # Its launcher may have reached the folder through a link.
    variable = b"ORTLAUNCH_RUN_DIR="
    places = [word.removeprefix(variable) for word in own.split(b"\0") if word.startswith(variable)]
    paths = (os.fsdecode(word) for word in (*command.split(b"\0"), *places) if word.startswith(b"/"))
    folder = os.path.realpath(run.path)
    return not has_ended(pid) and any(os.path.realpath(path) == folder for path in paths)


def _quiet_seconds(run: Run) -> float:
    """Seconds since the last journal event or the first worker's last sign of life."""
    ages = []
    for file in (run.journal_file, run.beat_file(0)):
        with suppress(OSError):
            ages.append(_age(file))
    return min(ages, default=float("inf"))


def _age(file: Path) -> float:
    # A file from the future was written before the clock was set back.
    return abs(time.time() - file.stat().st_mtime)
