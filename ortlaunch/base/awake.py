"""A clock that counts only the time in which this process could run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_STEP_SECONDS = 2.0
"""The most that one call of `tick` counts. The calls come several times a second."""


class AwakeClock:
    """Counts the seconds in which this process could run.

    A process does not run while it is stopped (SIGSTOP, ``scontrol suspend``), while its container is paused, and while
    its machine is suspended. The monotonic clock goes on in most of these cases, so it cannot tell how long something
    took.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: gives seconds, and goes on while this process does not run.
        """
        self._clock = clock
        self._last = clock()
        self.seconds = 0.0
        """The seconds counted so far."""

    def tick(self) -> float:
        """Counts the time since the last call.

        Returns:
            The seconds of it that are not counted, because this process did not run.
        """
        now = self._clock()
        passed = max(0.0, now - self._last)
        self._last = now
        counted = min(passed, _STEP_SECONDS)
        self.seconds += counted
        return passed - counted


def why_not_running(pid: int) -> str:
    """Returns why a process of this machine does not run: it was stopped, or its group is frozen; empty if it runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        if state in ("T", "t"):
            return "it was stopped by a signal (SIGSTOP, or a job that is suspended)"
        groups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (OSError, IndexError):
        return ""
    if any(_is_frozen(*line.split(":", 2)[1:]) for line in groups):
        return "its group of processes is frozen, as that of a paused container is"
    return ""


def _is_frozen(controllers: str, group: str) -> bool:
    """Whether a control group is frozen, of version 2 (``controllers`` is empty) or of the freezer of version 1."""
    if controllers not in ("", "freezer"):
        return False
    file, said = ("cgroup.events", "frozen 1") if not controllers else ("freezer.state", "FROZEN")
    try:
        return said in Path("/sys/fs/cgroup", controllers, group.lstrip("/"), file).read_text()
    except OSError:
        return False
