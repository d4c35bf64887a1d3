"""The run folders below the run roots, from their names alone: ``ROOT/<experiment>/<timestamp>-<name>-<id>``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.errors import RequestError

_NAME = re.compile(r"(?P<time>\d{8}-\d{6})-(?P<name>.+)-(?P<id>[0-9a-f]{6})")


@dataclass(frozen=True)
class RunFolder:
    """One run folder, not yet opened."""

    path: Path
    experiment: str
    name: str
    run_id: str
    """ortlaunch's short id."""
    time: str
    """When it was made, as text that sorts."""
    changed: int
    """Modification time of the folder in nanoseconds: it changes with every launch of the run, and with its end."""


def scan(roots: Iterable[Path]) -> list[RunFolder]:
    """All run folders below the roots, the newest first. Opens none of them."""
    found = {folder.path: folder for root in roots for folder in _below(root)}
    return sorted(found.values(), key=lambda folder: (folder.time, folder.run_id), reverse=True)


def folder_at(path: Path) -> RunFolder:
    """The run folder at a path, whatever it is called.

    Raises:
        RequestError: it is none.
    """
    path = path.expanduser().absolute()
    if not any((path / name).is_file() for name in ("config.yaml", "journal.jsonl")):
        raise RequestError(f"{path} is no run folder: it has no config.yaml")
    changed = path.stat().st_mtime_ns
    return _parsed(path, path.parent.name, changed) or RunFolder(
        path, path.parent.name, path.name, path.name.rpartition("-")[2], "", changed
    )


def _below(root: Path) -> Iterator[RunFolder]:
    for experiment in _folders(root):
        for entry in _folders(Path(experiment.path)):
            try:
                changed = entry.stat().st_mtime_ns
            except OSError:
                continue
            if (folder := _parsed(Path(entry.path), experiment.name, changed)) is not None:
                yield folder


def _folders(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _parsed(path: Path, experiment: str, changed: int) -> RunFolder | None:
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return RunFolder(path, experiment, match["name"], match["id"], match["time"], changed)
