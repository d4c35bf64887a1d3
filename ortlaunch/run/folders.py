"""Lists the run folders below the run roots by their names: ``ROOT/<experiment>/<timestamp>-<name>-<id>``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run

_NAME = re.compile(r"(?P<time>\d{8}-\d{6})-(?P<name>.+)-(?P<id>[0-9a-f]{6})")


@dataclass(frozen=True)
class RunFolder:
    """One run folder, of which only the name has been read."""

    place: str
    """The folder's path. It is text, which is cheaper than a `Path`: there may be ten thousand folders."""
    root: Path
    """The run root that holds the folder."""
    experiment: str
    name: str
    run_id: str
    """ortlaunch's short id."""
    time: str
    """When the folder was created, as text that sorts by time."""
    changed: int
    """The folder's modification time in nanoseconds. Every launch of the run and its end change it."""

    @property
    def path(self) -> Path:
        """The folder's path."""
        return Path(self.place)


def scan(roots: Iterable[Path]) -> list[RunFolder]:
    """All run folders below the roots, the newest first. It opens none of them."""
    found = {folder.place: folder for root in roots for folder in _below(root)}
    return sorted(found.values(), key=lambda folder: (folder.time, folder.run_id), reverse=True)


def folder_at(path: Path) -> RunFolder:
    """The run folder at a path. It may have any name.

    Raises:
        RequestError: the path is no run folder.
    """
    path = path.expanduser().absolute()
    run = Run(path)
    if not run.journal_file.is_file():
        run.require(run.config_file)
    changed = path.stat().st_mtime_ns
    place, root, experiment = str(path), path.parents[1], path.parent.name
    return _parsed(place, path.name, root, experiment, changed) or RunFolder(
        place, root, experiment, path.name, RunKey.of_folder(path.name).run_id, "", changed
    )


def has_runs_name(name: str) -> bool:
    """Whether a folder has the name of a run folder."""
    return _NAME.fullmatch(name) is not None


def _below(root: Path) -> Iterator[RunFolder]:
    for experiment in _folders(root):
        for entry in _folders(experiment):
            try:
                changed = entry.stat().st_mtime_ns
            except OSError:
                continue
            if (folder := _parsed(entry.path, entry.name, root, experiment.name, changed)) is not None:
                yield folder


def _folders(path: os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _parsed(place: str, name: str, root: Path, experiment: str, changed: int) -> RunFolder | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return RunFolder(place, root, experiment, match["name"], match["id"], match["time"], changed)
