"""The memory of a machine that a run's workers share: this machine's, or what the run asks of SLURM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, LocalConfig, SlurmConfig

_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
HERE = "free on this machine"
"""Where the limit is from for runs on this machine."""
_UNLIMITED = 2**62
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


def parsed(text: str, key: str) -> int:
    """Bytes of a size such as 80GiB, 80G or 512M. As in SLURM, units are powers of 1024, and a bare number means MiB.

    Args:
        text: the size.
        key: the option or key that has it, for messages.

    Raises:
        RequestError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise RequestError(f"{key}={text}: not a size of memory; write 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def limit_of(config: Config) -> tuple[int | None, str]:
    """Bytes of each machine of the run, and where they are from; None if the configuration does not say."""
    launcher = config.launcher
    if isinstance(launcher, LocalConfig):
        return available(), HERE
    if isinstance(launcher, SlurmConfig) and launcher.memory not in (None, "0"):
        return parsed(str(launcher.memory), "launcher.memory"), "launcher.memory"
    return None, "not known: give launcher.memory or --memory"


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
