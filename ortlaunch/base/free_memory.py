"""The memory that processes can still take here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_UNLIMITED = 2**62


def available(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that processes can still take here: of the machine, and of the control groups that this process is in.

    Args:
        root: where the control groups are mounted; replaced in tests.
        own: the file that names the groups of this process.
    """
    free = int(psutil.virtual_memory().available)
    return min([free, *(_free_in(folder) for folder in _groups(root, own))])


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's groups that may limit memory: its own and those above it, of both versions."""
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                top = root / "memory" if controllers else root
                inner = top / path.lstrip("/")
                yield from (one for one in (inner, *inner.parents) if one.is_relative_to(top) and one != top)
    # In a container its own group is the root.
    yield from (root, root / "memory")


def _free_in(group: Path) -> int:
    """Bytes that a control group can still take; files in its memory that nobody uses are given up for them."""
    for most, used, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # A group without a limit says max, or a number beyond all memory.
        with suppress(OSError, ValueError):
            left = int((group / most).read_text()) - int((group / used).read_text())
            with suppress(OSError, ValueError):
                lines = (group / "memory.stat").read_text().splitlines()
                left += int(dict(line.split() for line in lines).get(unused, 0))
            return max(0, left)
    return _UNLIMITED
