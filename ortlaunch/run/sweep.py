"""A sweep: a group of runs with a folder and a parent run in MLflow.

The sweep's folder is a small run folder. Its journal becomes the parent run in MLflow, in the same way as the journal
of every run. Each run of the sweep has a ``sweep.json`` that names the sweep. When a run ends, it writes a mark in the
sweep's folder ``ended/``. The run that writes the last mark ends the parent run, with the worst status of the runs.
"""

from __future__ import annotations

import json
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import notice, read_json, read_text
from ortlaunch.base.secrets import hidden, without_secrets, without_secrets_in_words
from ortlaunch.run.events import Status, is_count
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.names import KIND_TAG, SWEEP_TAG
from ortlaunch.run.run import Run

SWEEP_FILE = "sweep.json"
"""In the sweep's folder, it describes the sweep. In a run folder, it names the run's sweep and its number there."""

HYDRA_FILE = "multirun.yaml"
"""The file that Hydra writes to the sweep's folder before the first run is known."""

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
        """Writes the list of the sweep's runs.

        Args:
            runs: the run folders, in the order of their numbers.
            complete: no run will be added, so the sweep has ended when all of these runs have.
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
    """Creates a sweep's folder with a journal that begins the parent run. It also removes secrets from Hydra's file.

    Args:
        folder: the sweep's folder.
        name: the parent run's name.
        experiment: the experiment of the runs.
        tracking: the node `tracking` of the runs' configuration, without credentials.
        command: the command line, for the record. Secrets in it are removed.
        trackers: the node `trackers` of the runs' configuration, without credentials.
    """
    import yaml

    hide_in_hydras_file(folder)
    command = without_secrets_in_words(command)

    sweep = Sweep(folder, name, experiment, secrets.token_hex(3))
    # Hydra has made the folder, where a run of a sweep on this machine begins it.
    make_run_folder(folder)
    (folder / _ENDED).mkdir(exist_ok=True)
    (folder / _TASKS).mkdir(exist_ok=True)
    config = {"experiment": experiment, "name": name, "tracking": tracking, "trackers": trackers or {}}
    replace_text(Run(folder).config_file, yaml.safe_dump(config))
    with Run(folder).journal() as journal:
        journal.start(experiment, name, sweep.run_id)
        tags = {KIND_TAG: "sweep", "ortlaunch.run_dir": str(folder), "ortlaunch.command": shlex.join(command)}
        journal.tags(tags)
    sweep.write([], complete=False)
    return sweep


def opened(folder: Path) -> Sweep | None:
    """The sweep in a folder, to add further runs to it; None if the folder holds no sweep."""
    content = read_json(folder / SWEEP_FILE)
    if content is None or runs_of(folder) is None:
        return None
    return Sweep(folder, str(content.get("name")), str(content.get("experiment")), str(content.get("run_id")))


def hide_in_hydras_file(folder: Path) -> None:
    """Removes secrets from the file that Hydra has written to a sweep's folder."""
    import yaml

    file = folder / HYDRA_FILE
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    try:
        shown = yaml.safe_dump(_hidden_overrides(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError:
        shown = without_secrets(text)
    replace_text(file, shown)


def _hidden_overrides(node: Any) -> Any:
    """The content of Hydra's file without secrets. Overrides are lists of KEY=VALUE."""
    if isinstance(node, dict):
        return {key: hidden(str(key), _hidden_overrides(value)) for key, value in node.items()}
    if isinstance(node, list):
        words = [word for word in node if isinstance(word, str)]
        return without_secrets_in_words(words) if len(words) == len(node) else [_hidden_overrides(one) for one in node]
    return node


def join(run_dir: Path, task: SweepTask) -> None:
    """Writes the run's sweep to the run folder, and the run folder's path to the sweep's folder."""
    _write_json(run_dir / SWEEP_FILE, {"folder": str(task.folder), "task": task.number})
    replace_text(task.folder / _TASKS / str(task.number), f"{run_dir}\n")


def task_of(run_dir: Path) -> SweepTask | None:
    """A run's place in its sweep; None for a run without a sweep."""
    content = read_json(run_dir / SWEEP_FILE)
    if content is None or "folder" not in content:
        return None
    folder, number = content["folder"], content.get("task")
    if not _is_path(folder) or not is_count(number):
        notice(run_dir / SWEEP_FILE, "it names no place in a sweep")
        return None
    return SweepTask(Path(folder), number)


def tags_of(run_dir: Path) -> dict[str, str]:
    """The tags that name a run's sweep and its place in it; empty for a run without a sweep."""
    task = task_of(run_dir)
    return {} if task is None else {SWEEP_TAG: str(task.folder), "ortlaunch.sweep_task": str(task.number)}


def runs_of(folder: Path) -> list[Path] | None:
    """The runs in a sweep's folder; None if the folder holds no sweep."""
    content = read_json(folder / SWEEP_FILE)
    if content is None or "runs" not in content:
        return None
    runs = content["runs"]
    if not isinstance(runs, list) or not all(map(_is_path, runs)):
        notice(folder / SWEEP_FILE, "its runs are no list of folders")
        return []
    return [Path(run) for run in runs]


def note_end(run_dir: Path, status: Status) -> Path | None:
    """Writes the mark of a run that has ended, and ends its sweep if it was the last run.

    Returns:
        The sweep's folder if the sweep is now over, so that its journal can be sent; otherwise None, also for a run
        without a sweep.
    """
    task = task_of(run_dir)
    if task is None or not task.folder.is_dir():
        return None
    mark = task.folder / _ENDED / str(task.number)
    replace_text(mark, status)
    content = read_json(task.folder / SWEEP_FILE) or {}
    runs = runs_of(task.folder)
    if not content.get("complete") or not runs:
        return None
    ended = _ends_of(task.folder)
    if len(ended) < len(runs):
        return None
    end(task.folder, set(ended))
    return task.folder


def end(folder: Path, statuses: set[str]) -> None:
    """Ends the parent run with the worst status: FAILED if a run failed, else KILLED if one was killed."""
    worst: Status = "FAILED" if "FAILED" in statuses else "KILLED" if "KILLED" in statuses else "FINISHED"
    with Run(folder).journal() as journal:
        journal.end(worst)


def marks_of(folder: Path) -> set[str]:
    """The statuses with which runs of a sweep have ended."""
    return set(_ends_of(folder))


def _ends_of(folder: Path) -> list[str]:
    return [read_text(path) for path in (folder / _ENDED).iterdir() if not path.name.startswith(".")]


def find_sweep(asked: str, roots: list[Path]) -> Path | None:
    """Finds a sweep by its folder, its name, its short id or its array's job id. It takes the newest of several.

    Args:
        asked: the text that the user typed.
        roots: the run roots to search.
    """
    given = Path(asked).expanduser().absolute()
    if runs_of(given) is not None:
        return given
    # Names tell no order: that of a tuning is a digest.
    folders = sorted((f for root in roots for f in root.glob("*/multirun-*")), key=_begun, reverse=True)
    return next((folder for folder in folders if asked in _names_of(folder)), None)


def _begun(folder: Path) -> float:
    try:
        return (folder / SWEEP_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _names_of(folder: Path) -> set[str]:
    content, job = read_json(folder / SWEEP_FILE) or {}, Run(folder).job() or {}
    names = (folder.name, content.get("name"), content.get("run_id"), job.get("job_id"))
    return {str(name) for name in names if name}


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    replace_text(path, json.dumps(content) + "\n")
