"""Finds the run that a user means by RUN: a run folder, its short id, its name, a job id, or MLflow's id."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.base.text import counted
from ortlaunch.follow.rows import Survey
from ortlaunch.launch.plan import folder_name
from ortlaunch.launch.table import queue_names
from ortlaunch.run.folders import RunFolder, folder_at, scan
from ortlaunch.run.roots import RUN_ROOT, known_roots
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import find_sweep, runs_of

HELP = "run folder, its short id, its name, or a job id"

_LISTED = 4
"""Lines of a message that lists runs: the whole message has six at most."""
_JOB_ID = re.compile(r"\d+([._\[][\w.\[\]-]*)?")
"""A job id: ``120``, ``120_3`` for a task of an array, or the form of another scheduler, such as ``120.server``."""
_MLFLOW_ID = re.compile(r"[0-9a-f]{8,32}")
"""MLflow's id of a run, or its beginning, which `compare` shows."""
_SHORT_ID = re.compile(r"[0-9a-f]{3,6}")


def find_run(asked: str, roots: list[Path] | None = None) -> RunFolder:
    """Returns the run that a user names.

    Args:
        asked: The user's text.
        roots: Run roots to look in; None for the one of this folder and those where the user has started runs.

    Raises:
        RequestError: No run or several match; the message lists them.
    """
    if "/" in asked or Path(asked).expanduser().is_dir():
        found = folder_at(Path(asked))
        if runs_of(found.path) is not None:
            raise RequestError(_is_a_sweep_message(asked))
        return found
    roots = known_roots() if roots is None else roots
    folders = scan(roots)
    matches = _matching(asked, folders)
    here = RUN_ROOT.absolute()
    # Runs below the current folder come before runs with the same name elsewhere.
    matches = [folder for folder in matches if folder.path.is_relative_to(here)] or matches
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise RequestError(
            _not_found_message(asked, folders) if find_sweep(asked, roots) is None else _is_a_sweep_message(asked)
        )
    listed = "\n".join(f"  {folder.run_id}  {folder.time}  {folder.path}" for folder in matches[:_LISTED])
    more = f"\n  and {len(matches) - _LISTED} older ones" if len(matches) > _LISTED else ""
    raise RequestError(f"{asked} means {len(matches)} runs: name one by its id or its folder\n{listed}{more}")


def run_or_folder(asked: str) -> Path:
    """Returns an existing folder unchanged, because it may be a checkpoint; else the folder that `find_run` finds.

    Raises:
        RequestError: As `find_run`.
    """
    given = Path(asked).expanduser().absolute()
    return given if given.is_dir() else find_run(asked).path


def find_runs(asked: str) -> list[RunFolder]:
    """Returns the runs that a user names: all of a sweep (by folder, name, id or array job), or a single run.

    Raises:
        RequestError: As `find_run`.
    """
    sweep = find_sweep(asked, known_roots())
    if sweep is not None:
        runs = runs_of(sweep) or []
        if runs and not any(run.is_dir() for run in runs):
            raise RequestError(f"{sweep}: none of the {counted(len(runs), 'run')} of this sweep is there any more")
        return [folder_at(run) for run in runs if run.is_dir()]
    return [find_run(asked)]


def _matching(asked: str, folders: list[RunFolder]) -> list[RunFolder]:
    """Returns the runs that match by id or job; if none do, by name; if none do, by the beginning of an id."""
    matches = {folder.path: folder for folder in folders if folder.run_id == asked}
    if _JOB_ID.fullmatch(asked):
        matches |= _of_job(asked, folders)
    if not matches:
        words = (asked, folder_name(asked))
        matches = {folder.path: folder for folder in folders if {folder.name, folder.path.name} & {*words}}
    if not matches and _SHORT_ID.fullmatch(asked):
        matches = {folder.path: folder for folder in folders if folder.run_id.startswith(asked)}
    if not matches and _MLFLOW_ID.fullmatch(asked):
        matches = {
            folder.path: folder for folder in folders if (Run(folder.path).mlflow_run_id() or "").startswith(asked)
        }
    return list(matches.values())


def _of_job(asked: str, folders: list[RunFolder]) -> dict[Path, RunFolder]:
    """Returns the runs of a job; the id of an array means all of its tasks."""
    survey = Survey(folders)
    jobs = survey.job_ids()
    found = {f.path: f for f in folders if asked in (jobs.get(f.place), jobs.get(f.place, "").partition("_")[0])}
    if not found and jobs:
        # The text may be the separate job number that a task of an array got when it started.
        tasks = {job.job_id for name in queue_names() if (job := survey.ask(name).find(asked)) is not None}
        found = {folder.path: folder for folder in folders if jobs.get(folder.place) in tasks}
    return found


def _is_a_sweep_message(asked: str) -> str:
    return f"{asked} is a sweep: name one of its runs (ortlaunch jobs --sweep {shlex.quote(asked)})"


def _not_found_message(asked: str, folders: list[RunFolder]) -> str:
    if not folders:
        return (
            f"there is no run {asked}: no run folder was found in {RUN_ROOT}/ or a known run root; name one by its path"
        )
    names = list(dict.fromkeys([*(f.run_id for f in folders), *(f.name for f in folders)]))
    near = nearest(asked, names)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"there is no run {asked} and no run folder of this name: {hint}give a run folder, its short id, its name or "
        "a job id (ortlaunch jobs)"
    )
