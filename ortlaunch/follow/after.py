"""`+after=RUN[,RUN...]`: starts a run only after other runs have finished.

In a queue, the run's job depends on the other jobs and the scheduler waits. On this machine the command itself waits.
"""

from __future__ import annotations

import time

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import say
from ortlaunch.config.schema import AnyRun
from ortlaunch.follow.find import find_runs
from ortlaunch.follow.rows import Row, Survey
from ortlaunch.follow.state import State
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.table import launcher_of
from ortlaunch.run.folders import RunFolder

WORD = "+after="

_POLL_SECONDS = 2.0


def split_after(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the command line without ``+after=``, which is no key of the configuration, and the runs it names.

    Raises:
        RequestError: one of them has an empty name.
    """
    named = [argument.removeprefix(WORD) for argument in arguments if argument.startswith(WORD)]
    for group in named:
        if not all(name.strip() for name in group.split(",")):
            # An empty variable in a script must not start a run at once that was to wait.
            raise RequestError(f"{WORD}{group} names no run: write {WORD}RUN, or leave it out to start at once")
    kept = [argument for argument in arguments if not argument.startswith(WORD)]
    return kept, [name for group in named for name in group.split(",")]


def after(config: AnyRun, names: list[str]) -> AnyRun:
    """Delays a run until others have finished: its job waits for theirs, or this command waits.

    Args:
        config: the configuration of the run.
        names: the runs that must finish first, as the user names them.

    Returns:
        The configuration with the keys that its launcher needs to wait.

    Raises:
        RequestError: one of them cannot finish any more, or is no job that the run's scheduler can wait for.
    """
    launcher = launcher_of(config)
    if isinstance(launcher, QueueLauncher):
        jobs = _jobs_of(launcher, names)
        return launcher.after(config, jobs) if jobs else config
    if not config.launcher.dry_run:
        wait_for(names)
    return config


def _jobs_of(launcher: QueueLauncher, names: list[str]) -> list[str]:
    """Returns the jobs of those runs that have not finished yet."""
    jobs = []
    folders = _folders(names)
    for row in Survey(folders).rows(folders):
        if _has_finished(row):
            continue
        if row.job_id is None or row.launcher != launcher.name:
            what = f"runs on {row.node_list} and not as a job" if row.job_id is None else f"is a job of {row.launcher}"
            raise RequestError(f"+after: {_name(row)} {what}, so {launcher.title} cannot wait for it")
        jobs.append(row.job_id)
    return jobs


def wait_for(names: list[str]) -> None:
    """Waits until runs have finished.

    Raises:
        RequestError: one of them has ended before it had finished.
    """
    folders = _folders(names)
    waiting = [row for row in Survey(folders).rows(folders) if not _has_finished(row)]
    if waiting:
        say(f"waiting for {', '.join(_name(row) for row in waiting)}")
    while waiting:
        time.sleep(_POLL_SECONDS)
        survey = Survey(folders)
        waiting = [row for row in survey.rows(folders) if _is_unasked(row, survey) or not _has_finished(row)]


def _is_unasked(row: Row, survey: Survey) -> bool:
    """Returns whether the state is unknown only because the scheduler could not be asked this time."""
    return row.state is State.UNKNOWN and survey.problem_of(row) != ""


def _folders(names: list[str]) -> list[RunFolder]:
    return [folder for name in names for folder in find_runs(name)]


def _has_finished(row: Row) -> bool:
    """Returns whether the run has finished; raises a RequestError if it cannot finish any more."""
    if row.state is State.FINISHED:
        return True
    if row.is_over or row.state is State.UNKNOWN:
        why = f" ({row.reason})" if row.reason else ""
        raise RequestError(f"+after: {_name(row)} is {row.state.value}{why}: resume it first (ortlaunch resume)")
    return False


def _name(row: Row) -> str:
    return f"{row.name} ({row.run_id})"
