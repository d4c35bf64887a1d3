"""The manifest of a folder: the size and the SHA-256 of every file. It shows whether the folder is complete."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.ownership import closed_to_others
from ortlaunch.base.reading import is_inside, load_json, open_plain

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

NAME = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 20
_THREADS = 4


def seal(folder: Path) -> None:
    """Writes the manifest of a folder and syncs files, folders and manifest to the disk.

    Raises:
        OSError: the disk is full or broken.
    """
    names = [path.relative_to(folder).as_posix() for path in _files(folder)]
    with _pool() as pool:
        entries = dict(zip(names, pool.map(lambda name: _entry(folder / name), names), strict=True))
    text = json.dumps({"format": _FORMAT, "files": entries}, indent=1) + "\n"
    with closed_to_others():
        file = (folder / NAME).open("w")
    with file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for inner in {folder, *(path.parent for path in _files(folder))}:
        sync_folder(inner)


def problems(folder: Path, *, contents: bool = True) -> list[str]:
    """What is wrong with a sealed folder, one line for each file; empty if the folder is as it was written.

    Args:
        folder: the folder.
        contents: read every file and compare its hash. False compares only the sizes.
    """
    listed = _read(folder)
    if listed is None:
        return [f"{NAME} is missing or cannot be read"]
    with _pool() as pool:
        found = pool.map(lambda item: _problem(folder / item[0], item[1], contents), listed.items())
        return [f"{name}: {text}" for name, text in zip(listed, found, strict=True) if text]


def listed(folder: Path) -> list[str]:
    """The names of the files that the manifest lists; empty without a manifest."""
    return list(_read(folder) or {})


def strangers(folder: Path) -> list[str]:
    """The files that were added to a folder after it was sealed. They belong to someone else."""
    known = {NAME, *listed(folder)}
    return [name for path in _files(folder) if (name := path.relative_to(folder).as_posix()) not in known]


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pool() -> ThreadPoolExecutor:
    # Imported here, because every command imports this module and few read a checkpoint.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_THREADS)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = _digest(path)
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": digest}


def _problem(path: Path, entry: dict[str, int | str], contents: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{size} bytes instead of {entry['size']}"
        if contents and _digest(path) != entry["sha256"]:
            return "its contents have changed since it was written"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _digest(path: Path) -> str:
    state = hashlib.sha256()
    with open_plain(path) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _read(folder: Path) -> dict[str, dict[str, int | str]] | None:
    try:
        stored = load_json(folder / NAME)
        files = stored["files"]
        sound = stored["format"] == _FORMAT and all({"size", "sha256"} <= entry.keys() for entry in files.values())
        # These names are joined to the folder, and files of these names are removed with it.
        sound = sound and all(is_inside(name) for name in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return files if sound else None
