"""Control groups of the kernel, of version 1 or 2, that a test limits or freezes."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")


class Group:
    """A control group of its own; `close` ends what is left in it."""

    def __init__(self, controller: str) -> None:
        """
        Args:
            controller: ``memory`` or ``freezer``.

        Raises:
            OSError: no group can be made here.
        """
        self._is_second = (_ROOT / "cgroup.controllers").is_file()
        parent = _ROOT if self._is_second else _ROOT / controller
        if self._is_second and controller == "memory":
            (parent / "cgroup.subtree_control").write_text("+memory")
        self.folder = parent / f"ortlaunch-test-{secrets.token_hex(4)}"
        self.folder.mkdir()

    def limit_memory(self, size: int) -> None:
        """Lets the kernel kill a process of it when they take more than so many bytes."""
        (self.folder / ("memory.max" if self._is_second else "memory.limit_in_bytes")).write_text(str(size))

    def take(self, process: psutil.Process) -> None:
        """Moves a process into it."""
        (self.folder / "cgroup.procs").write_text(str(process.pid))

    def freeze(self, *, on: bool) -> None:
        """Freezes its processes, as a container that is paused, or lets them go on."""
        if self._is_second:
            (self.folder / "cgroup.freeze").write_text(str(int(on)))
        else:
            (self.folder / "freezer.state").write_text("FROZEN" if on else "THAWED")

    def kills(self) -> int:
        """How many of its processes the kernel has killed for lack of memory."""
        text = (self.folder / ("memory.events" if self._is_second else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def close(self) -> None:
        """Removes it, when its processes have ended."""
        deadline = time.monotonic() + 20
        while self.folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                self.folder.rmdir()
            time.sleep(0.05)
