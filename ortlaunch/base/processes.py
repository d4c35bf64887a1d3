"""Calls to the kernel that concern other processes."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress
from pathlib import Path

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers warn a job that its end is near."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send this process a signal when the process that started it dies, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def be_first_to_die() -> None:
    """Asks the kernel to end this process, and what it starts, before others when the memory is used up."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
