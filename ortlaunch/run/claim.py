"""The right to write a run. One launcher holds it at a time, also on a file system whose locks do not work.

A claim is a numbered file in the run's folder ``claims``. The claim with the highest number owns the run. A launcher
takes the next number by creating its file exclusively (``O_EXCL``). Local and network file systems make this atomic:
if two launchers try at once, one succeeds. A launcher may try only when the owner has released its claim or is gone.

An owner on this machine is gone when its process is. An owner on another machine must renew its claim every few
seconds, by the file's modification time; without a renewal for a minute it counts as gone. An owner that was only
suspended, or cut off from the file system, finds the higher number at its next renewal and stops its workers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import read_json
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run, is_job_id

RENEW_SECONDS = 5.0
LAPSE_SECONDS = 60.0
_RELEASED = "released"


@dataclass(frozen=True)
class Owner:
    """The launcher that holds a claim."""

    process: Process | None
    """None where the claim's file cannot be parsed, for example while it is being written."""
    job: str | None
    """The scheduler's job that the owner belongs to. If it is set, the scheduler says whether the owner is gone."""
    is_released: bool
    quiet_seconds: float
    """Seconds since the last renewal."""

    def is_gone(self, job_is_over: Callable[[str], bool] = lambda _: False) -> bool:
        """Whether another launcher may take the run.

        Args:
            job_is_over: asks the scheduler whether a job is over.
        """
        if self.is_released:
            return True
        if self.job is not None:
            return job_is_over(self.job)
        if self.process is not None and self.process.is_here:
            return not self.process.lives
        return self.quiet_seconds > LAPSE_SECONDS


class Claim:
    """This process's right to write a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._renewed = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether another launcher has taken the run over."""
        return _newest(self._path.parent) != int(self._path.name)

    def keep(self) -> bool:
        """Renews the claim when that is due. The launcher calls it again and again while the run lasts.

        Returns:
            Whether this process still holds the run.
        """
        now = time.monotonic()
        if now - self._renewed < RENEW_SECONDS:
            return True
        newest = _newest(self._path.parent)
        if newest is None:
            # The file system does not answer. The next call tries again.
            return True
        if newest != int(self._path.name):
            return False
        self._renewed = now
        with suppress(OSError):
            os.utime(self._path)
        return True

    def release(self) -> None:
        """Releases the claim, so that another launcher can take the run at once."""
        with suppress(OSError):
            if not self.is_lost:
                content = read_json(self._path) or {}
                self._path.write_text(json.dumps(content | {_RELEASED: True}) + "\n")


def take(run: Run, job: str | None = None, job_is_over: Callable[[str], bool] = lambda _: False) -> Claim:
    """Claims a run for this process.

    Args:
        run: the run; its folder must exist.
        job: the scheduler's job that this process belongs to. A claim of the same job is taken over, because the
            scheduler runs only one instance of a job at a time.
        job_is_over: asks the scheduler whether another job is over.

    Raises:
        RequestError: another process holds the run.
    """
    run.claims.mkdir(exist_ok=True)
    newest = _newest(run.claims)
    if newest is not None:
        holder = _owner(run.claims / str(newest))
        if not (job is not None and holder.job == job) and not holder.is_gone(job_is_over):
            raise RequestError(_refusal(run, holder))
    path = run.claims / str((newest or 0) + 1)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise RequestError(f"{run.path} is being launched by another process at this moment") from None
    with open(descriptor, "w") as file:
        file.write(json.dumps(asdict(Process.this()) | ({"job": job} if job is not None else {})) + "\n")
    return Claim(path)


def release_of(run: Run, job: str) -> None:
    """Releases a job's claim after the job has journalled its end, because the job itself may take a while to end."""
    newest = _newest(run.claims)
    if newest is not None and _owner(path := run.claims / str(newest)).job == job:
        Claim(path).release()


def owner(run: Run) -> Owner | None:
    """The present or last owner of a run; None for a run without claims, such as a run of an older release."""
    newest = _newest(run.claims)
    return _owner(run.claims / str(newest)) if newest is not None else None


def _refusal(run: Run, holder: Owner) -> str:
    if holder.job is not None:
        return f"{run.path} belongs to job {holder.job}, which is not over: cancel it first"
    if holder.process is None:
        return f"{run.path} is being launched by another process at this moment"
    if holder.process.is_here:
        return f"{run.path} is still running (process {holder.process.pid}): stop it first"
    return (
        f"{run.path} is still running on {holder.process.host} (process {holder.process.pid}; it gave a sign "
        f"{holder.quiet_seconds:.0f} s ago): stop it there first, or wait until it has given none for "
        f"{LAPSE_SECONDS:.0f} s"
    )


def _newest(folder: Path) -> int | None:
    """The highest number of a claim; None if there is no claim, or if the file system does not answer."""
    try:
        return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=None)
    except OSError:
        return None


def _owner(path: Path) -> Owner:
    content = read_json(path) or {}
    job = content.get("job")
    job = job if isinstance(job, str) and is_job_id(job) else None
    return Owner(Process.stored(content), job, bool(content.get(_RELEASED)), _quiet_seconds(path))


def _quiet_seconds(path: Path) -> float:
    """Seconds since a claim was renewed.

    This machine's clock is used first. The file system's clock is read only if the first result is negative or too old.
    """
    renewed = path.stat().st_mtime
    quiet = time.time() - renewed
    if not 0 <= quiet <= LAPSE_SECONDS:
        with suppress(OSError):  # The folder may be read-only.
            quiet = _now(path.parent) - renewed
    return quiet


def _now(folder: Path) -> float:
    """The file system's time, which may differ from this machine's."""
    probe = folder / f".now-{os.getpid()}-{time.monotonic_ns()}"
    with probe.open("w"):
        pass
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
