"""Which run a user means by RUN: a run folder, its short id, its name, a job id, or MLflow's id."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.follow.rows import Survey
from ortlaunch.launch.plan import folder_name
from ortlaunch.launch.table import queue_names
from ortlaunch.run.folders import RunFolder, folder_at, scan
from ortlaunch.run.roots import RUN_ROOT, known_roots
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import find_sweep, runs_of

HELP = "run folder, its short id, its name, or a job id"

_LISTED = 10
_JOB_ID = re.compile(r"\d+([._\[][\w.\[\]-]*)?")
"""``120``, ``120_3`` for a task of an array, and what other schedulers make of a number, such as ``120.server``."""
_MLFLOW_ID = re.compile(r"[0-9a-f]{8,32}")
"""What `compare` shows is its beginning."""
_SHORT_ID = re.compile(r"[0-9a-f]{3,6}")


def find_run(asked: str, roots: list[Path] | None = None) -> RunFolder:
    """The run that a user names.

    Args:
        asked: What was typed.
        roots: Run roots to look in; None for the one of this folder and those where the user has started runs.

    Raises:
        RequestError: No run is meant, or several are; they are then listed.
    """
    if "/" in asked or Path(asked).expanduser().is_dir():
        found = folder_at(Path(asked))
        if runs_of(found.path) is not None:
            raise RequestError(_of_a_sweep(asked))
        return found
    roots = known_roots() if roots is None else roots
    folders = scan(roots)
    meant = _meant(asked, folders)
    here = RUN_ROOT.absolute()
    # What lies where the user is comes before what they have elsewhere under the same name.
    meant = [folder for folder in meant if folder.path.is_relative_to(here)] or meant
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise RequestError(_nothing(asked, folders) if find_sweep(asked, roots) is None else _of_a_sweep(asked))
    listed = "\n".join(f"  {folder.run_id}  {folder.time}  {folder.path}" for folder in meant[:_LISTED])
    more = f"\n  and {len(meant) - _LISTED} older ones" if len(meant) > _LISTED else ""
    raise RequestError(f"{asked} means {len(meant)} runs: name one by its id or its folder\n{listed}{more}")


def run_or_folder(asked: str) -> Path:
    """A folder that is there, as it is, since it may be a checkpoint in a run; anything else as `find_run` takes it.

    Raises:
        RequestError: As `find_run`.
    """
    given = Path(asked).expanduser().absolute()
    return given if given.is_dir() else find_run(asked).path


def find_runs(asked: str) -> list[RunFolder]:
    """The runs that a user names: those of a sweep, where its folder, name, id or array is named, or the one run.

    Raises:
        RequestError: As `find_run`.
    """
    sweep = find_sweep(asked, known_roots())
    if sweep is not None:
        return [folder_at(run) for run in runs_of(sweep) or [] if run.is_dir()]
    return [find_run(asked)]


def _meant(asked: str, folders: list[RunFolder]) -> list[RunFolder]:
    """The surest reading that fits some run: an id or a job, then a name, then the beginning of an id."""
    meant = {folder.path: folder for folder in folders if folder.run_id == asked}
    if _JOB_ID.fullmatch(asked):
        meant |= _of_job(asked, folders)
    if not meant:
        words = (asked, folder_name(asked))
        meant = {folder.path: folder for folder in folders if {folder.name, folder.path.name} & {*words}}
    if not meant and _SHORT_ID.fullmatch(asked):
        meant = {folder.path: folder for folder in folders if folder.run_id.startswith(asked)}
    if not meant and _MLFLOW_ID.fullmatch(asked):
        meant = {
            folder.path: folder for folder in folders if (Run(folder.path).mlflow_run_id() or "").startswith(asked)
        }
    return list(meant.values())


def _of_job(asked: str, folders: list[RunFolder]) -> dict[Path, RunFolder]:
    """Runs of a job; the number of an array means all of its tasks."""
    survey = Survey(folders)
    jobs = survey.job_ids()
    found = {f.path: f for f in folders if asked in (jobs.get(f.place), jobs.get(f.place, "").partition("_")[0])}
    if not found and jobs:
        # The number that a task of an array was given when it started.
        tasks = {job.job_id for name in queue_names() if (job := survey.ask(name).find(asked)) is not None}
        found = {folder.path: folder for folder in folders if jobs.get(folder.place) in tasks}
    return found


def _of_a_sweep(asked: str) -> str:
    return f"{asked} is a sweep: name one of its runs (ortlaunch jobs --sweep {shlex.quote(asked)})"


def _nothing(asked: str, folders: list[RunFolder]) -> str:
    if not folders:
        return f"there is no run {asked}, and no run folder is known: they lie below runs/; name one by its path"
    names = list(dict.fromkeys([*(f.run_id for f in folders), *(f.name for f in folders)]))
    near = difflib.get_close_matches(asked, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"there is no run {asked} and no run folder of this name: {hint}give a run folder, its short id, its name or "
        "a job id (ortlaunch jobs)"
    )
