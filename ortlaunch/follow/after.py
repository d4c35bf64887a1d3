"""`+after=RUN[,RUN...]`: a run that begins only when other runs have finished.

On SLURM the job depends on the other's and the cluster does the waiting; on this machine the command waits itself.
"""

from __future__ import annotations

import time

from ortlaunch.base.errors import RequestError
from ortlaunch.follow.find import find_runs
from ortlaunch.follow.rows import Row, Survey
from ortlaunch.follow.state import State
from ortlaunch.run.folders import RunFolder

WORD = "+after="

_POLL_SECONDS = 2.0


def split_after(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line without ``+after=``, which is no key of a run's configuration, and the runs that it names."""
    named = [argument.removeprefix(WORD) for argument in arguments if argument.startswith(WORD)]
    kept = [argument for argument in arguments if not argument.startswith(WORD)]
    return kept, [name for group in named for name in group.split(",") if name]


def dependency(names: list[str], given: str | None) -> str | None:
    """What the job of a run that comes after others waits for, in SLURM's words.

    Args:
        names: the runs that come first, as the user names them.
        given: `launcher.dependency`.

    Raises:
        RequestError: one of them cannot finish any more, or is no job of SLURM.
    """
    jobs = []
    for row in _rows(_folders(names)):
        if _has_finished(row):
            continue
        if row.job_id is None:
            raise RequestError(
                f"+after: {_name(row)} runs on {row.node_list} and not as a job, so SLURM cannot wait for it"
            )
        jobs.append(row.job_id)
    return ",".join(part for part in (given, ":".join(["afterok", *jobs]) if jobs else None) if part) or None


def wait_for(names: list[str]) -> None:
    """Waits until runs have finished.

    Raises:
        RequestError: one of them has ended without.
    """
    folders = _folders(names)
    said = False
    while waiting := [row for row in _rows(folders) if not _has_finished(row)]:
        if not said:
            print(f"waiting for {', '.join(_name(row) for row in waiting)}", flush=True)
        said = True
        time.sleep(_POLL_SECONDS)


def _folders(names: list[str]) -> list[RunFolder]:
    return [folder for name in names for folder in find_runs(name)]


def _rows(folders: list[RunFolder]) -> list[Row]:
    return Survey(folders).rows(folders)


def _has_finished(row: Row) -> bool:
    """Whether the run has; raises for one that will not."""
    if row.state is State.FINISHED:
        return True
    if row.is_over or row.state is State.UNKNOWN:
        why = f" ({row.reason})" if row.reason else ""
        raise RequestError(f"+after: {_name(row)} is {row.state.value}{why}: go on with it first (ortlaunch resume)")
    return False


def _name(row: Row) -> str:
    return f"{row.name} ({row.run_id})"
