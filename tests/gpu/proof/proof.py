"""What the sections of a proof share: the machine, the time, checks, and commands that are bounded in time."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.gpu.needed import ROOT
from tests.gpu.proof.budget import Budget, OutOfTime
from tests.gpu.proof.report import Outcome, Row
from tests.support.runs import Recorded

LONGEST_RUN = 150.0
"""Seconds after which a command counts as hung."""
_LEAST = 5.0
"""No command that trains ends in fewer seconds."""


class Failed(Exception):
    """Something else was seen than expected; the message says what."""


class NotPossible(Exception):
    """This machine cannot show it; the message says why."""


@dataclass(frozen=True)
class Check:
    """One row: `look` returns what it saw, or raises `Failed`, `NotPossible` or `OutOfTime`."""

    what: str
    expected: str
    look: Callable[[], str]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return f"exit code {self.code}: {self.output[-1500:]}"


@dataclass(frozen=True)
class Training(Recorded):
    """A run of ortlaunch that finished, and the folder that it was started in."""

    folder: Path

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return run_dir_in(self.folder)

    def last(self, name: str) -> float:
        """A metric's last value.

        Raises:
            Failed: the run has not recorded it.
        """
        values = self.series(name)
        if not values:
            raise Failed(f"the run recorded no {name}")
        return values[max(values)]


@dataclass
class Proof:
    """One proof on one machine."""

    device: str
    """``cuda`` or ``cpu``."""
    workers: int
    jobs: int
    """Commands at a time where no speed is measured."""
    folder: Path
    """Where runs and files are made."""
    budget: Budget
    _trainings: dict[tuple[str, ...], Future[Training]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_cuda(self) -> bool:
        """Whether this proof is of CUDA."""
        return self.device == "cuda"

    def needs_cuda(self, why: str) -> None:
        """Raises `NotPossible` on the CPU."""
        if not self.is_cuda:
            raise NotPossible(why)

    def judge(self, checks: Sequence[Check], *, together: bool = False) -> Iterator[Row]:
        """Makes a row of each check, in their order; with `together` several run at a time."""
        with ThreadPoolExecutor(self.jobs if together else 1) as pool:
            yield from pool.map(judged, checks)

    def train(self, *words: str, device: str | None = None, long: bool = False) -> Training:
        """A run with these keys, made once however many checks ask for it.

        Args:
            words: its keys.
            device: another one than the proof's.
            long: it compiles. On a CPU whose cores other work shares that has no bound but the section's time.

        Raises:
            Failed: it did not finish.
            OutOfTime: there is no time for it.
        """
        key = (device or self.device, *words)
        with self._lock:
            found = self._trainings.get(key)
            mine = found is None
            found = self._trainings.setdefault(key, Future())
        if mine:
            try:
                found.set_result(self._trained(*key, long=long))
            except BaseException as error:
                found.set_exception(error)
        return found.result()

    def _trained(self, device: str, *words: str, long: bool) -> Training:
        folder = self.new_folder()
        most = math.inf if long and not self.is_cuda else LONGEST_RUN
        ended = self.command(["-m", "ortlaunch", *self.keys(device), *words], folder, most=most)
        if ended.code:
            raise Failed(ended.tail)
        return Training(folder)

    def keys(self, device: str | None = None) -> tuple[str, ...]:
        """What all runs of this proof have in common."""
        return f"device={device or self.device}", f"launcher.workers_per_node={self.workers}"

    def new_folder(self) -> Path:
        """An empty folder of its own for a command."""
        folder = self.folder / f"{next(self._numbers):02}"
        folder.mkdir(parents=True)
        return folder

    def command(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, most: float = LONGEST_RUN
    ) -> Ended:
        """Runs Python with `words` in a folder and waits for its end; nothing of it is left when its time is over.

        Raises:
            Failed: it ran longer than `most` seconds.
            OutOfTime: the section's time was over before or while it ran.
        """
        seconds = self.budget.take(most, _LEAST)
        started = self.start(words, folder, variables)
        try:
            output, _ = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_with_children(started.pid)
            try:
                output, _ = started.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                output = "something that it started still holds its output"
            if seconds < most:
                raise OutOfTime(f"the section's time was over when it had run for {seconds:.0f} s") from None
            raise Failed(f"no end after {seconds:.0f} s: {output[-1000:]}") from None
        except BaseException:
            # An interrupt of the proof leaves no training behind.
            end_with_children(started.pid)
            raise
        return Ended(started.returncode, output)

    def start(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts Python with `words`; output and errors come by one pipe."""
        cache = self.folder / "cache"
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "ORTLAUNCH_CACHE": str(cache)}
        # Triton's cache is in it too. What was compiled on this machine before would make a compilation look short.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
        # One line in a worker's log says that NCCL made a communicator.
        environment |= {"NCCL_DEBUG": "VERSION", "PYTHONUTF8": "1", **(variables or {})}
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


def judged(check: Check) -> Row:
    """The row of a check; whatever goes wrong in it is that row's failure alone."""
    try:
        seen, outcome = check.look(), Outcome.ok
    except NotPossible as error:
        seen, outcome = str(error), Outcome.not_possible
    except OutOfTime as error:
        seen, outcome = str(error), Outcome.skipped
    except Failed as error:
        seen, outcome = str(error), Outcome.failed
    except Exception as error:
        seen, outcome = f"{type(error).__name__}: {error}", Outcome.failed
    return Row(check.what, check.expected, seen, outcome)


def run_dir_in(folder: Path) -> Path:
    """The only run folder below the folder that a run was started in.

    Raises:
        Failed: there is none, or there are several.
    """
    found = sorted(folder.glob("runs/*/*/config.yaml"))
    if len(found) != 1:
        raise Failed(f"{len(found)} run folders instead of one")
    return found[0].parent


def end_with_children(pid: int) -> None:
    """Kills a process that was started here, and all below it."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.Error):
                one.kill()


def in_tree(path: str) -> Path:
    """A file of the tree that is proven."""
    return ROOT / path
