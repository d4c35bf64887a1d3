"""The slots of this machine: its GPUs, or groups of workers on the CPU; and those that other processes use."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ortlaunch.base.text import public_text

_log = logging.getLogger(__name__)
_SECONDS = 20.0
_PATIENCE_SECONDS = 3.0
"""So long is an answer waited for. One that takes longer counts when it comes."""
_FRESH_SECONDS = 5.0
_DRIVER_SECONDS = 60.0
"""How often a machine is asked again whose nvidia-smi finds no GPU: at boot the driver may come after the service."""
_GPU = "gpu"
_SIGN = "ortlaunch-serve"
_TAKEN = "another ortlaunch serve of this machine gives it out"
_USED, _MISSING = "a process that is not of this queue uses it", "nvidia-smi does not find it"
_NO_DEVICES = "No devices were found"
"""What some versions say without an exit code."""
_LONGEST_LINE = 200
_WITHOUT_GPU = (6, 9, 12)
"""Exit codes of nvidia-smi: it finds no device, the driver is not loaded, or its library is not there."""


class NoAnswer(Exception):
    """The GPUs cannot be told: nvidia-smi is there and fails."""


@dataclass
class Slots:
    """Looks at the machine when it is asked, every few seconds at most.

    A thread looks, one at a time: a driver that hangs holds nvidia-smi so that not even a kill ends it.
    """

    limit: int | None = None
    """How many slots there are; None: all GPUs, or one group of workers on a machine without GPUs."""
    trouble: str = ""
    """Why the slots, or those that other processes use, cannot be told now; empty if they can."""
    use: dict[str, dict[str, float]] = field(default_factory=dict)
    """How ``busy`` each GPU is, and the share of its ``memory`` that is taken, by slot; as it was last told."""
    _names: tuple[str, ...] | None = None
    _withheld: dict[str, str] | None = None
    _held: dict[str, socket.socket] = field(default_factory=dict)
    """What shows that this service gives a GPU out, by the GPU's UUID."""
    _next: float = float("-inf")
    """When the machine may be looked at again."""
    _began: float = float("-inf")
    _is_done: threading.Event = field(default_factory=threading.Event)
    """Whether the latest look has ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._is_done.set()

    def names(self) -> tuple[str, ...]:
        """Returns the names of all slots, such as ``gpu0``.

        There are none as long as they cannot be told: a run on the CPU would be no answer to a GPU that is not found.
        GPUs stay as they are while the service runs; groups on the CPU give way to GPUs that nvidia-smi finds later.
        """
        self._refresh()
        return self._names or ()

    def withheld(self) -> dict[str, str]:
        """Returns the slots that no run may get now, and why. GPUs that our own runs use are among them.

        While that cannot be told, what was told last counts; all GPUs are withheld, if there was no answer yet.
        """
        self._refresh()
        if self._withheld is None:
            return {name: self.trouble for name in self._names or () if name.startswith(_GPU)}
        return self._withheld

    def _refresh(self) -> None:
        """Begins a look if one is due, and waits for it, though not for one that hangs."""
        with self._lock:
            if self._is_done.is_set() and time.monotonic() >= self._next:
                self._is_done.clear()
                self._began = time.monotonic()
                threading.Thread(target=self._look, name="slots", daemon=True).start()
        if not self._is_done.wait(max(0.0, self._began + _PATIENCE_SECONDS - time.monotonic())):
            self._note(f"nvidia-smi has given no answer for more than {_PATIENCE_SECONDS:g} s")

    def _look(self) -> None:
        try:
            self._ask()
        except NoAnswer as error:
            self._note(str(error))
        else:
            self._note("")
        finally:
            is_cpu = any(not name.startswith(_GPU) for name in self._names or ())
            self._next = time.monotonic() + (_DRIVER_SECONDS if is_cpu else _FRESH_SECONDS)
            self._is_done.set()

    def _ask(self) -> None:
        """Asks which GPUs there are, and which of them other processes use."""
        listed = _gpus()
        present = {index: uuid for index, (uuid, _) in listed.items()}
        self.use = {f"{_GPU}{index}": use for index, (_, use) in listed.items() if use}
        names = tuple(f"{_GPU}{index}" for index in _visible(present))[: self.limit]
        if names and (self._names is None or not self._names[0].startswith(_GPU)):
            self._withheld = None
            self._names = names
        elif self._names is None:
            self._names = tuple(f"cpu{index}" for index in range(1 if self.limit is None else self.limit))
        used = _used() if present else frozenset()
        gpus = {name: present.get(int(name.removeprefix(_GPU))) for name in self._names if name.startswith(_GPU)}
        self._withheld = {name: why for name, uuid in gpus.items() if (why := self._why_not(uuid, used))}

    def _why_not(self, uuid: str | None, used: frozenset[str]) -> str:
        """Why a GPU is not given out; empty if it is."""
        if uuid is None:
            return _MISSING
        if uuid not in self._held:
            # The kernel knows such a name once on the machine, for all its users, and forgets it with the process.
            sign = socket.socket(socket.AF_UNIX)
            try:
                sign.bind(f"\0{_SIGN}-{uuid}")
            except OSError:
                sign.close()
                return _TAKEN
            self._held[uuid] = sign
        return _USED if uuid in used else ""

    def _note(self, trouble: str) -> None:
        """Notes why there is no answer. A failure is written into the log once."""
        if trouble and trouble != self.trouble:
            _log.warning("%s", trouble)
        self.trouble = trouble


def gpus_of(names: Iterable[str]) -> list[int] | None:
    """Returns the numbers of the GPUs among some slots; None for slots on the CPU."""
    numbers = [int(name.removeprefix(_GPU)) for name in names if name.startswith(_GPU)]
    return numbers or None


def _visible(present: dict[int, str]) -> list[int]:
    """The numbers of the GPUs that the service may give away."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(present)
    allowed = [word.strip() for word in visible.split(",") if word.strip()]
    return [index for index, uuid in present.items() if any(_means(word, index, uuid) for word in allowed)]


def _means(word: str, index: int, uuid: str) -> bool:
    """Whether a word of CUDA_VISIBLE_DEVICES means a GPU: its number, or the beginning of its UUID."""
    return int(word) == index if word.isdecimal() else word.startswith("GPU-") and uuid.startswith(word)


def _gpus() -> dict[int, tuple[str, dict[str, float]]]:
    """The UUIDs of the GPUs by their numbers, and how busy they are, where that can be told."""
    columns = "index,uuid,utilization.gpu,memory.used,memory.total"
    form = r"(\d+), *(GPU-\S+?)(?:, *(?:(\d+) %|\[.*?\]), *(?:(\d+) MiB|\[.*?\]), *(?:(\d+) MiB|\[.*?\]))?"
    found = {}
    for number, uuid, busy, used, total in _query("gpu", columns, form):
        shares = {} if None in (busy, used, total) else {"busy": int(busy) / 100, "memory": int(used) / int(total)}
        found[int(number)] = uuid, shares
    return found


def _used() -> frozenset[str]:
    """The UUIDs of the GPUs on which some process computes."""
    return frozenset(uuid for uuid, _ in _query("compute-apps", "gpu_uuid,pid", r"((?:GPU|MIG)-\S+), *(.*)"))


def _query(what: str, columns: str, form: str) -> list[tuple[str, ...]]:
    """Asks nvidia-smi; no rows where it is not there, or finds no GPU.

    Args:
        what: what is asked for.
        columns: the columns.
        form: a regular expression with a group for each column of a row.

    Raises:
        NoAnswer: it fails otherwise, takes too long, or says something else.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"nvidia-smi gives no answer within {_SECONDS:g} s") from None
    except OSError as error:
        raise NoAnswer(f"nvidia-smi cannot be started: {error.strerror}") from None
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    if done.returncode in _WITHOUT_GPU or lines == [_NO_DEVICES]:
        return []
    if done.returncode:
        said = [*lines, *done.stderr.decode(errors="replace").strip().splitlines()]
        raise NoAnswer(f"nvidia-smi fails with exit code {done.returncode}{f': {_shown(said[-1])}' if said else ''}")
    rows = [re.fullmatch(form, line) for line in lines]
    if None in rows:
        raise NoAnswer(f"the output of nvidia-smi cannot be read: {_shown(lines[rows.index(None)])}")
    return [row.groups() for row in rows if row is not None]


def _shown(line: str) -> str:
    return public_text(line)[:_LONGEST_LINE]
