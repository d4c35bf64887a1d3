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


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock on a file. Nobody is refused the lock because of the look.

    It reads the kernel's list of locks, which does not show those of other containers.

    Returns:
        None if the file cannot be opened, or the kernel shows no list.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        place, listed = _place(handle), Path("/proc/locks").read_text().splitlines()
    except (OSError, LookupError, ValueError):
        return None
    finally:
        os.close(handle)
    # NUMBER: FLOCK ADVISORY WRITE PID DEVICE:INODE START END. A process that waits has an arrow before FLOCK.
    return any(words[1:2] == ["FLOCK"] and words[5:6] == [place] for words in map(str.split, listed))


def _place(handle: int) -> str:
    """An open file as the kernel's list names it: by the device of its mount, which `os.fstat` may name otherwise."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines())
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    devices = {words[0]: words[2] for words in mounts}
    major, minor = devices[facts["mnt_id"].strip()].split(":")
    return f"{int(major):02x}:{int(minor):02x}:{os.fstat(handle).st_ino}"


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
