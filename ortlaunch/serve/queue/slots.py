"""The slots of this machine: its GPUs, or groups of workers on the CPU; and those that other processes use."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

_SECONDS = 20.0
_FRESH_SECONDS = 5.0
_GPU = "gpu"


@dataclass
class Slots:
    """Looks at the machine when it is asked, every few seconds at most."""

    limit: int | None = None
    """How many slots there are; None: all GPUs, or one group of workers on a machine without GPUs."""
    _names: tuple[str, ...] | None = None
    _foreign: frozenset[str] = frozenset()
    _looked: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def names(self) -> tuple[str, ...]:
        """Returns the names of all slots, such as ``gpu0``; they do not change while the service runs."""
        with self._lock:
            if self._names is None:
                self._names = self._found()
            return self._names

    def foreign(self) -> frozenset[str]:
        """Returns the slots on which some process computes. Those of our own runs are among them."""
        names = self.names()
        if not names or not names[0].startswith(_GPU):
            return frozenset()
        with self._lock:
            if time.monotonic() - self._looked > _FRESH_SECONDS:
                self._foreign, self._looked = _used_gpus() & frozenset(names), time.monotonic()
            return self._foreign

    def _found(self) -> tuple[str, ...]:
        gpus = tuple(f"{_GPU}{index}" for index in _gpus())
        if gpus:
            return gpus[: self.limit]
        return tuple(f"cpu{index}" for index in range(1 if self.limit is None else self.limit))


def gpus_of(names: Iterable[str]) -> list[int] | None:
    """Returns the numbers of the GPUs among some slots; None for slots on the CPU."""
    numbers = [int(name.removeprefix(_GPU)) for name in names if name.startswith(_GPU)]
    return numbers or None


def _gpus() -> list[int]:
    """The numbers of the GPUs that the service may give away."""
    present = [int(row[0]) for row in _query("gpu", "index") if row[0].isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    allowed = {int(word) for word in visible.split(",") if word.strip().isdecimal()}
    return [index for index in present if index in allowed]


def _used_gpus() -> frozenset[str]:
    index_of = {row[1]: row[0] for row in _query("gpu", "index,uuid") if len(row) == 2}
    used = {row[0] for row in _query("compute-apps", "gpu_uuid,pid") if row}
    return frozenset(f"{_GPU}{index}" for uuid, index in index_of.items() if uuid in used)


def _query(what: str, columns: str) -> list[list[str]]:
    """Asks nvidia-smi; no rows where it is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
