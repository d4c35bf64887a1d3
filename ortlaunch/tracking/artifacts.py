"""Decides which files a journal may have sent to a tracker.

A journal names the files to keep with a run. Another user may have written it, or the folder may be a copy. So only
files inside the run folder are sent, and exports of this run, which lie where the user wanted them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.base.reading import in_words, read_json

EXPORT_RECORD = "export.json"
"""The file in the folder of an export that names the run that it was made of."""


def why_not_sent(run_dir: Path, path: str) -> str | None:
    """Why a file or folder that a journal names is not sent; None if it may be, also if it does not exist.

    Args:
        run_dir: the run folder.
        path: the path in the journal, relative to the run folder or absolute.
    """
    try:
        folder, full = run_dir.resolve(), _resolved(run_dir / path)
        if not full.is_relative_to(folder):
            folder = full if full.is_dir() else full.parent
            if not _is_export_of(folder, run_dir):
                return "it is outside the run folder, and no export of this run"
        return next((why for inner in _below(full) if (why := _why_not_inner(inner, folder))), None)
    except (OSError, ValueError, RuntimeError) as error:
        return in_words(error)
    return None


def _resolved(path: Path) -> Path:
    """The path without links.

    Raises:
        OSError: the links make a loop; before Python 3.13 a RuntimeError.
    """
    try:
        # From Python 3.13 on, a loop is found only so.
        return path.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return path.resolve()


def _is_export_of(folder: Path, run_dir: Path) -> bool:
    """Whether a folder holds an export of this run. The run folder may have been moved, but keeps its name."""
    named = (read_json(folder / EXPORT_RECORD) or {}).get("run_dir")
    return isinstance(named, str) and Path(named).name == run_dir.resolve().name


def _why_not_inner(path: Path, folder: Path) -> str | None:
    if not path.resolve().is_relative_to(folder):
        return f"{path} leads out of {folder}"
    if not path.is_file() and not path.is_dir():
        return f"{path} is no plain file"
    return None


def _below(path: Path) -> Iterator[Path]:
    """The file, or all files in a folder and the folders below it. Links to folders are not followed."""
    if not path.is_dir():
        yield from [path] if path.exists() else []
    for folder, folders, names in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *names))
