"""Measures, from the kernel's counters, how much processor time the run uses and how much other processes use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.processes import tree

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Fields of a line of /proc/stat that are no work: idle and iowait."""
_COUNTED = 8
"""Number of fields that count; guest time follows them, and user time already contains it."""


@dataclass(frozen=True)
class Usage:
    """Processor seconds over a period."""

    total: float
    """Available on the cores that the run may use."""
    busy: float
    """Used by any process on these cores."""
    own: float
    """Used by the run's processes."""

    def since(self, earlier: Usage) -> Usage:
        """Returns the difference to an earlier reading."""
        return Usage(self.total - earlier.total, self.busy - earlier.busy, self.own - earlier.own)

    @property
    def busy_percent(self) -> float:
        """Share of the cores that was used."""
        return 100.0 * self.busy / self.total if self.total > 0 else 0.0

    @property
    def other(self) -> float:
        """Seconds that other processes used; never negative, although the counters are not read at the same moment."""
        return max(0.0, self.busy - self.own)


def read_usage(roots: list[int], cores: set[int] | None = None, proc: Path = Path("/proc")) -> Usage:
    """Reads the counters.

    Args:
        roots: processes that belong to the run with all of their descendants.
        cores: the cores that count as the machine; by default the cores that this process may use.
        proc: the kernel's file system; replaced in tests.

    Raises:
        OSError: there is no /proc/stat.
    """
    total, busy = _machine(proc, os.sched_getaffinity(0) if cores is None else cores)
    return Usage(total, busy, sum(_used(proc, pid) for pid in tree(roots, proc)))


def _machine(proc: Path, cores: set[int]) -> tuple[float, float]:
    """Returns available and used seconds on the given cores; on all cores if a container shows other numbers."""
    everything, chosen = (0.0, 0.0), (0.0, 0.0)
    for line in (proc / "stat").read_text().splitlines():
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        ticks = [float(field) for field in fields[:_COUNTED]]
        total = sum(ticks) / _TICKS
        busy = total - sum(ticks[index] for index in _IDLE) / _TICKS
        if name == "cpu":
            everything = (total, busy)
        elif int(name[3:]) in cores:
            chosen = (chosen[0] + total, chosen[1] + busy)
    return chosen if chosen[0] > 0 else everything


def _used(proc: Path, pid: int) -> float:
    """Returns the processor seconds of a process and its ended children; 0 if the process is gone or hidden."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return sum(float(fields[index]) for index in (11, 12, 13, 14)) / _TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
