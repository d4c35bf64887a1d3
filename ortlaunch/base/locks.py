"""Lock files, which end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, wait_seconds: float = 0) -> Iterator[bool]:
    """Holds a lock file; yields whether it is held, after `wait_seconds` at most.

    Where the folder cannot be written or its file system knows no locks, there is nobody to lock out: yields True.
    """
    handle = _opened(path)
    try:
        yield handle is None or _locked(handle, time.monotonic() + wait_seconds)
    finally:
        if handle is not None:
            os.close(handle)


def _opened(path: Path) -> int | None:
    for mode in (os.O_RDWR, os.O_RDONLY):  # NFS locks only what is open for writing; another user may only read it.
        try:
            return os.open(path, mode | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
