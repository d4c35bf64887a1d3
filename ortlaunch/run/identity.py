"""The identity of a launcher's process. It shows whether a run's launcher was killed or is still running."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

_LARGEST_PID = (1 << 31) - 1
"""The largest number that ``kill`` takes."""


@dataclass(frozen=True)
class Process:
    """The identity of a process. No later process has the same one."""

    host: str
    pid: int
    start_ticks: int
    """When the process started, in clock ticks since the host's boot."""

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls(socket.gethostname(), os.getpid(), start_ticks(os.getpid()))

    @classmethod
    def stored(cls, content: dict[str, Any] | None) -> Process | None:
        """The process that a stored JSON object names; None where it names none."""
        if content is None:
            return None
        host, pid, ticks = (content.get(name) for name in ("host", "pid", "start_ticks"))
        sound = isinstance(host, str) and is_pid(pid) and type(ticks) is int
        return cls(host, pid, ticks) if sound else None  # type: ignore[arg-type]

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether it runs on this machine."""
        return self.is_here and is_alive(self.pid, self.start_ticks)


def is_pid(value: Any) -> TypeGuard[int]:
    """Whether a value can be the id of a process. Zero and negative numbers mean groups of processes to ``kill``."""
    return type(value) is int and 0 < value <= _LARGEST_PID


def is_own(pid: int) -> bool:
    """Whether a process of this machine belongs to this process's user."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False


def has_open(pid: int, path: Path) -> bool:
    """Whether a process of this user has a file open. Another user's process cannot be looked into."""
    try:
        wanted = path.stat()
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with suppress(OSError):
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot. The process id and this time identify a process.

    Raises:
        OSError: there is no such process.
    """
    return int(_stat(pid)[19])


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process with this id and start time still runs."""
    try:
        values = _stat(pid)
    except OSError:
        return False
    return values[0] not in ("Z", "X") and int(values[19]) == ticks


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on. Index 0 is the state and index 19 the start time."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The second field, the command's name, may hold spaces and parentheses.
    return text.rpartition(")")[2].split()
