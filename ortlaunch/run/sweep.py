"""A sweep: runs that belong together, their folder, and the run in MLflow under which they stand.

The sweep's folder is a small run folder of its own: its journal becomes the parent run in MLflow by the same way as
every run's does. Each of its runs has a ``sweep.json`` that names it. When a run ends it leaves a mark in the sweep's
``ended/``; the one that leaves the last mark ends the parent, as it truly ended.
"""

from __future__ import annotations

import json
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.files import replace_text
from ortlaunch.base.secrets import without_secrets
from ortlaunch.run.events import Status
from ortlaunch.run.names import KIND_TAG, SWEEP_TAG
from ortlaunch.run.run import Run, read_json

SWEEP_FILE = "sweep.json"
"""In the sweep's folder: what it is. In a run's: which sweep it belongs to, and its number there."""

HYDRA_FILE = "multirun.yaml"
"""In the sweep's folder: what Hydra leaves there before the first run is known."""

_ENDED, _TASKS = "ended", "tasks"


@dataclass(frozen=True)
class SweepTask:
    """A run's place in a sweep."""

    folder: Path
    number: int


@dataclass
class Sweep:
    """A sweep's folder."""

    folder: Path
    name: str
    experiment: str
    run_id: str

    @property
    def journal(self) -> Path:
        """The parent run's journal."""
        return Run(self.folder).journal_file

    def write(self, runs: list[Path], *, complete: bool) -> None:
        """Writes which runs there are.

        Args:
            runs: the run folders, in the order of their numbers.
            complete: no further run will come: when all of these have ended, the sweep has.
        """
        content = {
            "name": self.name,
            "experiment": self.experiment,
            "run_id": self.run_id,
            "runs": [str(run) for run in runs],
            "complete": complete,
        }
        _write_json(self.folder / SWEEP_FILE, content)


def create(
    folder: Path,
    name: str,
    experiment: str,
    tracking: dict[str, Any],
    command: list[str],
    trackers: dict[str, Any] | None = None,
) -> Sweep:
    """Makes a sweep's folder, with a journal that begins the parent run; without credentials, Hydra's file included.

    Args:
        folder: where.
        name: what the parent run is called.
        experiment: the experiment of its runs.
        tracking: the node `tracking` of their configuration, without credentials.
        command: the command line, for the record.
        trackers: the node `trackers`, likewise.
    """
    import yaml

    hydras = folder / HYDRA_FILE
    if hydras.is_file():
        replace_text(hydras, without_secrets(hydras.read_text(encoding="utf-8")))
    command = [without_secrets(word) for word in command]

    sweep = Sweep(folder, name, experiment, secrets.token_hex(3))
    (folder / _ENDED).mkdir(parents=True, exist_ok=True)
    (folder / _TASKS).mkdir(exist_ok=True)
    config = {"experiment": experiment, "name": name, "tracking": tracking, "trackers": trackers or {}}
    Run(folder).config_file.write_text(yaml.safe_dump(config))
    with Run(folder).journal() as journal:
        journal.start(experiment, name, sweep.run_id)
        tags = {KIND_TAG: "sweep", "ortlaunch.run_dir": str(folder), "ortlaunch.command": shlex.join(command)}
        journal.tags(tags)
    sweep.write([], complete=False)
    return sweep


def join(run_dir: Path, task: SweepTask) -> None:
    """Notes in a run folder that the run belongs to a sweep, and in the sweep's where its task finds the folder."""
    _write_json(run_dir / SWEEP_FILE, {"folder": str(task.folder), "task": task.number})
    (task.folder / _TASKS / str(task.number)).write_text(f"{run_dir}\n")


def task_of(run_dir: Path) -> SweepTask | None:
    """A run's place in its sweep; None for a run that belongs to none."""
    content = read_json(run_dir / SWEEP_FILE)
    if content is None or "folder" not in content:
        return None
    return SweepTask(Path(content["folder"]), int(content["task"]))


def tags_of(run_dir: Path) -> dict[str, str]:
    """The tags of a run that say which sweep it belongs to."""
    task = task_of(run_dir)
    return {} if task is None else {SWEEP_TAG: str(task.folder), "ortlaunch.sweep_task": str(task.number)}


def runs_of(folder: Path) -> list[Path] | None:
    """The runs of a sweep's folder; None if it is none."""
    content = read_json(folder / SWEEP_FILE)
    return None if content is None or "runs" not in content else [Path(run) for run in content["runs"]]


def note_end(run_dir: Path, status: Status) -> Path | None:
    """A run has ended: leaves its mark, and ends its sweep if it was the last.

    Returns:
        The sweep's folder if the sweep is over now and its journal is to be sent; None otherwise, and for a run that
        belongs to no sweep.
    """
    task = task_of(run_dir)
    if task is None or not task.folder.is_dir():
        return None
    mark = task.folder / _ENDED / str(task.number)
    replace_text(mark, status)
    content = read_json(task.folder / SWEEP_FILE) or {}
    if not content.get("complete") or not content.get("runs"):
        return None
    ended = _ends_of(task.folder)
    if len(ended) < len(content["runs"]):
        return None
    end(task.folder, set(ended))
    return task.folder


def end(folder: Path, statuses: set[str]) -> None:
    """Ends the parent run as its runs ended: FAILED if one failed, else KILLED if one was killed."""
    worst: Status = "FAILED" if "FAILED" in statuses else "KILLED" if "KILLED" in statuses else "FINISHED"
    with Run(folder).journal() as journal:
        journal.end(worst)


def marks_of(folder: Path) -> set[str]:
    """How the runs of a sweep that are over have ended."""
    return set(_ends_of(folder))


def _ends_of(folder: Path) -> list[str]:
    return [path.read_text() for path in (folder / _ENDED).iterdir() if not path.name.startswith(".")]


def find_sweep(asked: str, roots: list[Path]) -> Path | None:
    """The sweep that a user names by its folder, its name, its short id or its array's job id; the newest of several.

    Args:
        asked: what was typed.
        roots: run roots to look in.
    """
    given = Path(asked).expanduser().absolute()
    if runs_of(given) is not None:
        return given
    folders = sorted((f for root in roots for f in root.glob("*/multirun-*")), key=lambda f: f.name, reverse=True)
    return next((folder for folder in folders if asked in _names_of(folder)), None)


def _names_of(folder: Path) -> set[str]:
    content, job = read_json(folder / SWEEP_FILE) or {}, Run(folder).job() or {}
    names = (folder.name, content.get("name"), content.get("run_id"), job.get("job_id"))
    return {str(name) for name in names if name}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    replace_text(path, json.dumps(content) + "\n")
