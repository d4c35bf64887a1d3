"""The right to write a run. One launcher holds it at a time, also on a file system whose locks do not work.

A claim is a numbered file in the run's folder ``claims``. The claim with the highest number owns the run. A launcher
takes the next number by creating its file exclusively (``O_EXCL``). Local and network file systems make this atomic:
if two launchers try at once, one succeeds. A launcher may try only when the owner has released its claim or is gone.

A command that submits a run to a scheduler claims it too, and hands the claim to the job, so that no other command
launches the run while the job waits in the queue.

An owner on this machine is gone when its process is. An owner on another machine must renew its claim every few
seconds, by the file's modification time; without a renewal for a minute it counts as gone. An owner that was only
suspended, or cut off from the file system, finds the higher number at its next renewal and stops its workers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import read_json
from ortlaunch.run.events import Status
from ortlaunch.run.identity import Process
from ortlaunch.run.run import KEPT_END, Run, is_job_id

RENEW_SECONDS = 5.0
LAPSE_SECONDS = 60.0
_OWN = "ORTLAUNCH_CLAIM"
"""The variable that names the claim of a worker's launcher."""
_RELEASED = "released"
_JOB = "job"


@dataclass(frozen=True)
class Owner:
    """The launcher that holds a claim."""

    process: Process | None
    """None where the claim's file cannot be parsed, for example while it is being written."""
    job: str | None
    """The scheduler's job that the owner belongs to. If it is set, the scheduler says whether the owner is gone."""
    is_released: bool
    quiet_seconds: float
    """Seconds since the last renewal. It is negative if the clock was set back since."""

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
        # A claim from far in the future was renewed before the clock was set back. A living owner renews it at once.
        return abs(self.quiet_seconds) > LAPSE_SECONDS


class Claim:
    """This process's right to write a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._renewed = _awake_or_asleep()

    @property
    def is_lost(self) -> bool:
        """Whether another launcher has taken the run over. Without an answer of the file system it has not."""
        return (_newest(self._path.parent) or 0) > int(self._path.name)

    def environment(self) -> dict[str, str]:
        """The variable by which the workers know the claim that they work under; see `own_number`."""
        return {_OWN: str(self._path)}

    def keep(self) -> bool:
        """Renews the claim when that is due. The launcher calls it again and again while the run lasts.

        Returns:
            Whether this process still holds the run.
        """
        now = _awake_or_asleep()
        if now - self._renewed < RENEW_SECONDS:
            return True
        if self.is_lost:
            return False
        self._renewed = now
        with suppress(OSError):
            os.utime(self._path)
        return True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renews the claim by a thread within its block, for work that may take longer than `LAPSE_SECONDS`."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEW_SECONDS) and self.keep():
                pass

        thread = threading.Thread(target=renew, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def release(self, end: tuple[Status, int] | None = None) -> None:
        """Releases the claim, so that another launcher can take the run at once. A claim of a job stays the job's.

        Args:
            end: how and when (in milliseconds) the run has ended, if its journal could not take this.
        """
        with suppress(OSError):
            content = read_json(self._path) or {}
            if not self.is_lost and _JOB not in content:
                _overwrite(self._path, content | {_RELEASED: True} | _kept(end))


def take(
    run: Run,
    job: str | None = None,
    job_is_over: Callable[[str], bool] = lambda _: False,
    after: int | None = None,
) -> Claim:
    """Claims a run for this process. A run that this process has already is its claim again.

    Args:
        run: the run; its folder must exist.
        job: the scheduler's job that this process belongs to. A claim of the same job is taken over, because the
            scheduler runs only one instance of a job at a time.
        job_is_over: asks the scheduler whether another job is over.
        after: what `number` has returned before the caller has read the run; None if it has read nothing.

    Raises:
        RequestError: another process holds the run, or has launched it since `after`.
        OSError: the claim cannot be written.
    """
    newest = number(run)
    if newest and job is None and _is_own(_owner(run.claims / str(newest))):
        return Claim(run.claims / str(newest))
    check_free(run, job, job_is_over)
    if after is not None and newest != after:
        raise RequestError(f"{run.path} was launched by another process meanwhile: ortlaunch status {run.path}")
    path = run.claims / str(newest + 1)
    content = asdict(Process.this()) | ({_JOB: job} if job is not None else {})
    run.claims.mkdir(exist_ok=True)
    if not _create(path, json.dumps(content) + "\n"):
        raise RequestError(f"{run.path} is being launched by another process at this moment")
    return Claim(path)


def check_free(run: Run, job: str | None = None, job_is_over: Callable[[str], bool] = lambda _: False) -> None:
    """Refuses a run that another process holds, without claiming it. The arguments are those of `take`.

    Raises:
        RequestError: another process holds the run.
    """
    holder = owner(run)
    if holder is not None and not (job is not None and holder.job == job) and not holder.is_gone(job_is_over):
        raise RequestError(_refusal(run, holder))


def _is_own(holder: Owner) -> bool:
    return holder.job is None and not holder.is_released and holder.process == Process.this()


def _create(path: Path, content: str) -> bool:
    """Creates a claim exclusively; returns False if another process has. One that cannot be written whole is removed.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "w") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def number(run: Run) -> int:
    """The number of the run's newest claim, which rises with each launch; 0 for a run without claims."""
    return _newest(run.claims) or 0


def own_number(run: Run) -> int:
    """The number of the claim that this worker's launcher has; that of the newest claim if the launcher names none.

    torchrun may start a worker again after another launcher has taken the run over.
    """
    own = Path(os.environ.get(_OWN, ""))
    return int(own.name) if own.parent == run.claims and own.name.isdecimal() else number(run)


def hand_over(run: Run, job: str) -> None:
    """Gives this process's claim to the job that it has submitted; the scheduler then says when it is free."""
    path = run.claims / str(number(run))
    content = read_json(path)
    if content is not None and Process.stored(content) == Process.this() and _RELEASED not in content:
        with suppress(OSError):
            replace_text(path, json.dumps(content | {_JOB: job}) + "\n")


def release(run: Run, end: tuple[Status, int] | None = None) -> None:
    """Releases this process's claim of a run whose job was refused; `end` is as for `Claim.release`."""
    newest = number(run)
    if newest and _owner(path := run.claims / str(newest)).process == Process.this():
        Claim(path).release(end)


def release_of(run: Run, job: str, end: tuple[Status, int] | None = None) -> None:
    """Releases a job's claim after the job has journalled its end, because the job itself may take a while to end.

    Args:
        run: the run.
        job: the job.
        end: as for `Claim.release`.
    """
    newest = _newest(run.claims)
    if newest is not None and _owner(path := run.claims / str(newest)).job == job:
        with suppress(OSError):
            _overwrite(path, (read_json(path) or {}) | {_RELEASED: True} | _kept(end))


def _kept(end: tuple[Status, int] | None) -> dict[str, Any]:
    return {} if end is None else {KEPT_END: {"status": end[0], "t": end[1]}}


def owner(run: Run) -> Owner | None:
    """The present or last owner of a run; None for a run without claims, such as a run of an older release."""
    newest = _newest(run.claims)
    return _owner(run.claims / str(newest)) if newest is not None else None


def _overwrite(path: Path, content: dict[str, Any]) -> None:
    """Overwrites a claim in place. This needs no further block of a disk that is full, as a new file would."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.write(json.dumps(content).encode().ljust(size - 1) + b"\n")


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
    job = content.get(_JOB)
    job = job if isinstance(job, str) and is_job_id(job) else None
    return Owner(Process.stored(content), job, bool(content.get(_RELEASED)), _quiet_seconds(path))


def _awake_or_asleep() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _quiet_seconds(path: Path) -> float:
    """Seconds since a claim was renewed.

    This machine's clock is used first. The file system's clock is read only if the first result is negative or too old.
    """
    try:
        renewed = path.stat().st_mtime
    except OSError:
        return 0.0  # It has just been removed, or the file system does not answer.
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
