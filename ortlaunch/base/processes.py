"""Calls to the kernel that concern other processes."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers warn a job that its end is near."""
_PR_SET_PDEATHSIG = 1
_BELOW = "ORTLAUNCH_BELOW"
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send this process a signal when the process that started it dies, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def be_first_to_die() -> None:
    """Asks the kernel to end this process, and what it starts, before others when the memory is used up."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Mark:
    """A word in the environment of all that a program starts: by it what has left its tree and session is found."""

    def __init__(self) -> None:
        self._word = f"{os.getpid()}-{time.monotonic_ns()}"

    def variables(self) -> dict[str, str]:
        """Returns the variable for the program's children. It also has the words of programs that this one is below."""
        return {_BELOW: " ".join([*os.environ.get(_BELOW, "").split(), self._word])}

    def processes(self) -> Iterator[psutil.Process]:
        """Yields this user's processes with the word. Others hide their environment."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if self._word in process.environ().get(_BELOW, "").split():
                    yield process


def tree(roots: Iterable[int], proc: Path = Path("/proc")) -> set[int]:
    """Returns the processes and all of their descendants; processes that cannot be read are skipped.

    Args:
        roots: process ids.
        proc: the kernel's file system; replaced in tests.
    """
    found: set[int] = set()
    waiting = [pid for pid in roots if (proc / str(pid)).is_dir()]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += _children(f"{proc}/{pid}/task", pid)
    return found


def _children(tasks: str, pid: int) -> list[int]:
    """Returns children from the kernel's own list, because a walk over all processes of a large machine is slow.

    It is one small file for each thread, read again and again beside a training: `pathlib` takes three times as long.
    """
    found: list[int] = []
    try:
        with os.scandir(tasks) as entries:
            threads = [entry.name for entry in entries]
    except OSError:
        return found
    for thread in threads:
        try:
            text = _content(f"{tasks}/{thread}/children")
        except FileNotFoundError:
            # The thread has ended, or the kernel does not have these lists.
            if Path(tasks, thread).is_dir():
                return _children_by_walking(pid)
            continue
        except OSError:
            continue
        found += map(int, text.split())
    return found


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _children_by_walking(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []
