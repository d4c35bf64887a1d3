"""Temporary folders of one process. What a killed process has left, the next process that makes a folder removes."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

_LOCK = ".in-use"
"""A file in each folder with this machine's name. The process that made the folder holds a lock on it."""
_PREFIX = "ortlaunch-"


class PrivateFolder:
    """A temporary folder that is there until `close`."""

    def __init__(self, name: str, place: str | None = None) -> None:
        """Makes the folder, and removes those whose process has ended without doing so.

        Args:
            name: a part of the folder's name.
            place: the folder to make it in; None for the one of temporary files.

        Raises:
            OSError: the folder cannot be made.
        """
        place = place or tempfile.gettempdir()
        _remove_left(place)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-", dir=place))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # The file system may have no locks. Then nobody can take this one either.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The folder may be removed by others from here on, and only if this process has ended.
        os.write(self._lock, platform.node().encode())

    def close(self) -> None:
        """Removes the folder."""
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _remove_left(place: str) -> None:
    """Removes this user's folders that no process holds."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                with _left(Path(entry.path) / _LOCK) as is_left:
                    if is_left:
                        shutil.rmtree(entry.path, ignore_errors=True)


@contextmanager
def _left(lock: Path) -> Iterator[bool]:
    """Yields whether nobody holds a folder's lock. Nobody can take it meanwhile."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False  # It is no folder of this module.
        return
    try:
        yield _is_free(handle)
    finally:
        os.close(handle)


def _is_free(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Other machines may have the same file system, and not see each other's locks.
        return os.read(handle, 256) == platform.node().encode()
    except OSError:
        return False
