"""Which process launches a run, so that one whose launcher was killed is told from one that goes on."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from ortlaunch.base.files import replace_text


def write_identity(run_dir: Path) -> None:
    """Says in ``launcher.json`` that this process launches the run."""
    identity = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start_ticks": start_ticks(os.getpid()),
    }
    # In one step: it is read at any moment. A new file also changes the folder's modification time, by which
    # `ortlaunch jobs` sees that what it knows of an earlier attempt no longer holds.
    replace_text(run_dir / "launcher.json", json.dumps(identity) + "\n")


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its number its identity.

    Raises:
        OSError: there is no such process.
    """
    return int(_stat(pid)[19])


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process with this number that started at this tick still runs."""
    try:
        values = _stat(pid)
    except OSError:
        return False
    return values[0] not in ("Z", "X") and int(values[19]) == ticks


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the state first, the start as the twentieth."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The command's name before them may hold spaces and parentheses.
    return text.rpartition(")")[2].split()
