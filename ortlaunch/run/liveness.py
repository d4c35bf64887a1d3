"""Whether a run that a launcher started goes on: the one place that answers it.

A scheduler answers for its own jobs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ortlaunch.base.locks import exclusive
from ortlaunch.run import claim
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run

SILENT_SECONDS = 1800.0
"""A launcher of an older release on another machine: after this long without a word it counts as gone."""
_FRESH_SECONDS = 30.0
"""A run without a launcher's file may be about to begin."""


class Alive(Enum):
    """What of a run lives."""

    LAUNCHER = "launcher"
    WORKERS = "workers"
    """They have outlived their launcher, and end by themselves."""
    MAYBE = "maybe"
    """Nobody can tell: it was launched on another machine and has said something not long ago, or is about to begin."""
    NOTHING = "nothing"


@dataclass(frozen=True)
class Liveness:
    """What of a run lives, and by whom that is known."""

    alive: Alive
    launcher: Process | None
    quiet_seconds: float
    """Since the last sign of life of a launcher on another machine, or of its workers."""


def liveness(run: Run, launcher: Process | None = None) -> Liveness:
    """Looks whether a run goes on, from this machine or any other that sees its folder.

    Args:
        run: the run.
        launcher: its launcher's process, where that has been read already.
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
        # It may be suspended, or cut off from the file system: its workers still give signs then.
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
    """Whether workers of a run live.

    They hold a lock while they do. Where locks hold nothing, their signs of life tell: by the process on this machine,
    by the time elsewhere.

    Args:
        run: the run.
        wait_seconds: how long they are given to end.
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
    with exclusive(run.workers_lock, wait_seconds) as free:
        return not free


def _give_signs(run: Run) -> bool:
    return any(_gives_sign(run, rank) for rank in _ranks(run))


def _ranks(run: Run) -> list[int]:
    with suppress(OSError):
        names = (path.stem.rpartition("-")[2] for path in run.health.glob("rank-*.json"))
        return [int(name) for name in names if name.isdecimal()]
    return []


def _gives_sign(run: Run, rank: int) -> bool:
    beat = run.beat(rank)
    process = Process(str(beat.get("host")), int(beat.get("pid") or 0), 0)
    if process.is_here:
        return _is_worker_of(process.pid, run)
    with suppress(OSError):
        # A sign that is older than the run's last end is that of a worker that has ended in order.
        return _age(run.beat_file(rank)) < claim.LAPSE_SECONDS and _time(beat) > (run.state().last_end or 0)
    return False


def _time(beat: dict[str, Any]) -> float:
    """When a worker gave its sign of life, in milliseconds."""
    said = beat.get("time")
    return 1000.0 * said if isinstance(said, float) else 0.0


def _is_worker_of(pid: int, run: Run) -> bool:
    """Whether the process is a worker of this run, and not a later one that was given its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X") and str(run.path).encode() in command.split(b"\0")


def _quiet_seconds(run: Run) -> float:
    """Since something was journalled, or the first worker gave a sign of life."""
    ages = []
    for file in (run.journal_file, run.beat_file(0)):
        with suppress(OSError):
            ages.append(_age(file))
    return min(ages, default=float("inf"))


def _age(file: Path) -> float:
    return time.time() - file.stat().st_mtime
