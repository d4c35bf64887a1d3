"""Opens files of a run folder, and only these: a run folder belongs to somebody who may be hostile.

No link is followed on the way, so that a run cannot show a file that its owner may not read and the service may.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from ortlaunch.base.reading import LARGEST

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_MOST_ENTRIES = 2000
"""Entries of a folder that are looked at."""
_MOST_NAMES = 50_000
"""Names of a folder that are read, of which the first ones are looked at: somebody may have made millions."""


def open_beneath(folder: Path | str, name: Path | str) -> BinaryIO:
    """Opens a plain file beneath a folder, without following links. It never waits.

    Args:
        folder: the run folder.
        name: the file's path relative to it.

    Raises:
        OSError: there is no such file, it cannot be read, it is no plain file, or a link leads to it.
    """
    *above, last = _parts(str(name))
    at = _open_folder(folder, above)
    try:
        descriptor = os.open(last, _FILE, dir_fd=at)
    finally:
        os.close(at)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(name))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def opened_path(folder: Path | str, name: Path | str) -> Iterator[Path]:
    """Yields a path to a file that was opened as by `open_beneath`, for readers that take a path.

    Raises:
        OSError: as `open_beneath`.
    """
    with open_beneath(folder, name) as file:
        yield Path(f"/proc/self/fd/{file.fileno()}")


def read_beneath(folder: Path | str, name: Path | str, largest: int = LARGEST) -> bytes:
    """Reads a file that is opened as by `open_beneath`.

    Raises:
        OSError: as `open_beneath`, or it is larger.
    """
    with open_beneath(folder, name) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest:,} bytes", str(name))
    return content


def files_beneath(folder: Path | str, name: Path | str = "") -> dict[str, os.stat_result]:
    """Returns the plain files in a folder beneath a run folder, by their names; none where there is no such folder.

    Names that nobody can type, such as those that are not UTF-8, are left out.

    Args:
        folder: the run folder.
        name: the folder's path relative to it; empty for the run folder itself.
    """
    return {entry: one for entry, one in _entries(folder, str(name)).items() if stat.S_ISREG(one.st_mode)}


def folders_beneath(folder: Path | str, name: Path | str = "") -> list[str]:
    """Returns the names of the folders in a folder beneath a run folder; none where there is no such folder.

    Args:
        folder: the run folder.
        name: the folder's path relative to it; empty for the run folder itself.
    """
    return [entry for entry, one in _entries(folder, str(name)).items() if stat.S_ISDIR(one.st_mode)]


def _entries(folder: Path | str, name: str) -> dict[str, os.stat_result]:
    try:
        at = _open_folder(folder, _parts(name) if name else [])
    except OSError:
        return {}
    found: dict[str, os.stat_result] = {}
    try:
        with os.scandir(at) as listed:
            names = [entry.name for entry in islice(listed, _MOST_NAMES)]
        # Neither JSON nor the address of a file can hold a name that is not UTF-8, and a page not one with line breaks.
        for entry in sorted(filter(str.isprintable, names))[:_MOST_ENTRIES]:
            if (one := _stat(entry, at)) is not None:
                found[entry] = one
    finally:
        os.close(at)
    return found


def _stat(name: str, at: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False)
    except OSError:
        return None


def _open_folder(folder: Path | str, parts: list[str]) -> int:
    at = os.open(folder, _FOLDER)
    for part in parts:
        above = at
        try:
            at = os.open(part, _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    return at


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise OSError(errno.ENOENT, "there is no such file", name)
    return parts


def identity(file: BinaryIO) -> tuple[int, int]:
    """What tells a file from one that took its place."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino
