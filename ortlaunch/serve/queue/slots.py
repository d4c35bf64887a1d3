"""The slots of this machine: its GPUs, or groups of workers on the CPU; and those that other processes use."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

_log = logging.getLogger(__name__)
_SECONDS = 20.0
_FRESH_SECONDS = 5.0
_DRIVER_SECONDS = 60.0
"""How often a machine is asked again whose nvidia-smi finds no GPU: at boot the driver may come after the service."""
_GPU = "gpu"
_T = TypeVar("_T")
_WITHOUT_GPU = (6, 9, 12)
"""Exit codes of nvidia-smi: it finds no device, the driver is not loaded, or its library is not there."""


class NoAnswer(Exception):
    """The GPUs cannot be told: nvidia-smi is there and fails."""


@dataclass
class Slots:
    """Looks at the machine when it is asked, every few seconds at most."""

    limit: int | None = None
    """How many slots there are; None: all GPUs, or one group of workers on a machine without GPUs."""
    trouble: str = ""
    """Why the slots, or those that other processes use, cannot be told now; empty if they can."""
    _names: tuple[str, ...] | None = None
    _foreign: frozenset[str] | None = None
    _looked: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def names(self) -> tuple[str, ...]:
        """Returns the names of all slots, such as ``gpu0``.

        There are none as long as they cannot be told: a run on the CPU would be no answer to a GPU that is not found.
        GPUs stay as they are while the service runs; groups on the CPU give way to GPUs that nvidia-smi finds later.
        """
        with self._lock:
            if self._is_open() and (found := self._asked(self._found)) is not None:
                self._names = found
            return self._names or ()

    def _is_open(self) -> bool:
        """Whether there may be other slots than those known."""
        if self._names is None:
            return self._is_due(_FRESH_SECONDS)
        is_cpu = not any(name.startswith(_GPU) for name in self._names)
        return is_cpu and self._is_due(_DRIVER_SECONDS) and shutil.which("nvidia-smi") is not None

    def foreign(self) -> frozenset[str]:
        """Returns the slots on which some process computes. Those of our own runs are among them.

        If they cannot be told, these are the former ones; all slots, if there was no answer yet.
        """
        names = self.names()
        if not names or not names[0].startswith(_GPU):
            return frozenset()
        with self._lock:
            is_first = self._foreign is None and not self.trouble
            if (is_first or self._is_due(_FRESH_SECONDS)) and (used := self._asked(_used_gpus)) is not None:
                self._foreign = used & frozenset(names)
            return frozenset(names) if self._foreign is None else self._foreign

    def _is_due(self, seconds: float) -> bool:
        return time.monotonic() - self._looked > seconds

    def _asked(self, question: Callable[[], _T]) -> _T | None:
        """Returns an answer of nvidia-smi; None if it gives none. A failure is written into the log once."""
        try:
            answer = question()
        except NoAnswer as error:
            if str(error) != self.trouble:
                _log.warning("%s", error)
            self.trouble = str(error)
            return None
        else:
            self.trouble = ""
            return answer
        finally:
            self._looked = time.monotonic()

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
    present = _uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(present)
    allowed = [word.strip() for word in visible.split(",") if word.strip()]
    return [index for index, uuid in present.items() if any(_means(word, index, uuid) for word in allowed)]


def _means(word: str, index: int, uuid: str) -> bool:
    """Whether a word of CUDA_VISIBLE_DEVICES means a GPU: its number, or the beginning of its UUID."""
    return int(word) == index if word.isdecimal() else word.startswith("GPU-") and uuid.startswith(word)


def _uuids() -> dict[int, str]:
    """The UUIDs of the GPUs by their numbers."""
    rows = _query("gpu", "index,uuid")
    return {int(row[0]): row[1] for row in rows if len(row) == 2 and row[0].isdecimal()}


def _used_gpus() -> frozenset[str]:
    used = {row[0] for row in _query("compute-apps", "gpu_uuid,pid") if row}
    return frozenset(f"{_GPU}{index}" for index, uuid in _uuids().items() if uuid in used)


def _query(what: str, columns: str) -> list[list[str]]:
    """Asks nvidia-smi; no rows where it is not there, or finds no GPU.

    Raises:
        NoAnswer: it fails otherwise, or takes too long.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"nvidia-smi gives no answer within {_SECONDS:g} s") from None
    except OSError as error:
        raise NoAnswer(f"nvidia-smi cannot be started: {error.strerror}") from None
    if done.returncode in _WITHOUT_GPU:
        return []
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise NoAnswer(f"nvidia-smi fails with exit code {done.returncode}{f': {said[-1]}' if said else ''}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
