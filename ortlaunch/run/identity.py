"""The identity of a launcher's process. It shows whether a run's launcher was killed or is still running."""

from __future__ import annotations

import functools
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
    machine: str = ""
    """The boot and the namespace that its id belongs to; see `machine`. Empty in a file of an older release."""

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls(socket.gethostname(), os.getpid(), start_ticks(os.getpid()), machine())

    @classmethod
    def stored(cls, content: dict[str, Any] | None) -> Process | None:
        """The process that a stored JSON object names; None where it names none."""
        if content is None:
            return None
        host, pid, ticks = (content.get(name) for name in ("host", "pid", "start_ticks"))
        where = content.get("machine", "")
        sound = isinstance(host, str) and is_pid(pid) and type(ticks) is int and isinstance(where, str)
        return cls(host, pid, ticks, where) if sound else None  # type: ignore[arg-type]

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this machine, in this container and since this boot."""
        return self.host == socket.gethostname() and self.machine in ("", machine())

    @property
    def is_of_earlier_boot(self) -> bool:
        """Whether it was on this machine before it was started again, so that it has ended with all its children."""
        its_boot, our_boot = (where.partition(" ")[0] for where in (self.machine, machine()))
        return self.host == socket.gethostname() and "" not in (its_boot, our_boot) and its_boot != our_boot

    @property
    def lives(self) -> bool:
        """Whether it runs on this machine."""
        return self.is_here and is_alive(self.pid, self.start_ticks)


@functools.cache
def machine() -> str:
    """Identifies this boot of this machine, and the namespace of its process ids; empty where /proc does not tell.

    Process ids are compared only if this is equal. Two containers with the host's network have one host name, and
    machines of a cluster may have one by mistake.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


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
    return not _has_ended(values) and int(values[19]) == ticks


def has_ended(pid: int) -> bool:
    """Whether no thread of a process runs any more, or there is no such process."""
    try:
        return _has_ended(_stat(pid))
    except OSError:
        return True


def _has_ended(values: list[str]) -> bool:
    # The main thread of a process becomes a zombie before its other threads have ended. They may still hold files and
    # locks, and the parent cannot wait for the process yet.
    return values[0] in ("Z", "X") and int(values[17]) <= 1


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: 0 is the state, 17 the number of threads, 19 the start time."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The second field, the command's name, may hold spaces and parentheses.
    return text.rpartition(")")[2].split()
