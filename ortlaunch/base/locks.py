"""Lock files. The kernel releases a lock when the process that holds it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, wait_seconds: float = 0) -> Iterator[bool]:
    """Takes the lock on a file, waits `wait_seconds` at most, and yields whether this process holds it.

    It also yields True where no lock is possible: the folder cannot be written, or its file system has no locks.
    """
    handle = _opened(path)
    try:
        yield handle is None or _locked(handle, time.monotonic() + wait_seconds)
    finally:
        if handle is not None:
            os.close(handle)


def _opened(path: Path) -> int | None:
    # NFS locks only files that are open for writing. A user who may not write the file opens it for reading.
    for mode in (os.O_RDWR, os.O_RDONLY):
        try:
            # Somebody may have put a FIFO there, for whose writer the call would wait, or a link to another file.
            return os.open(path, mode | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
        except OSError:
            continue
    return None


def _locked(handle: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return True
        else:
            return True
