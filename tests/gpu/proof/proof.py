"""What the sections of a proof share: the machine, the time, checks, and commands that are bounded in time."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
RUNS = "ORTLAUNCH_PROOF_RUNS"
"""The variable that tells tests/gpu the folder of a proof, whose runs they look at instead of training again."""


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
    is_shared: bool = False
    """Whether several commands use the machine at the same time now."""
    _trainings: dict[tuple[str, ...], Future[Training]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._places = threading.BoundedSemaphore(self.jobs)
        self._mine = threading.local()

    @property
    def is_cuda(self) -> bool:
        """Whether this proof is of CUDA."""
        return self.device == "cuda"

    def needs_cuda(self, why: str) -> None:
        """Raises `NotPossible` on the CPU."""
        if not self.is_cuda:
            raise NotPossible(why)

    def judge(self, checks: Sequence[Check], *, together: bool = False) -> Iterator[Row]:
        """Makes a row of each check, in their order; with `together` they begin at once, and their commands take turns.

        A check that waits for the run of another one takes no command's place.
        """
        with ThreadPoolExecutor(len(checks) if together and self.jobs > 1 else 1) as pool:
            yield from pool.map(judged, checks)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for `jobs` commands; waits for it, and keeps it for all commands of this thread within.

        Raises:
            OutOfTime: the section's time was over before there was one.
        """
        if getattr(self._mine, "has_place", False):
            yield
            return
        if not self._places.acquire(timeout=self.budget.take(math.inf, _LEAST)):
            raise OutOfTime(f"the section's time was over before one of {self.jobs} commands had ended")
        self._mine.has_place = True
        try:
            yield
        finally:
            self._mine.has_place = False
            self._places.release()

    def ahead(self, *words: str, device: str | None = None, long: bool = False) -> None:
        """Begins a run that rows will wait for before they ask, so that it gets a place before theirs."""

        def begin() -> None:
            # A row that asks for the run gets its error.
            with suppress(Exception):
                self.train(*words, device=device, long=long)

        if self.jobs > 1:
            threading.Thread(target=begin, daemon=True).start()

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
        digest = hashlib.sha256("\0".join((device, *words)).encode()).hexdigest()[:16]
        folder = self.folder / f"run-{digest}"
        if (before := _finished(folder)) is not None:
            return before
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
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
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder))

    def command(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, most: float = LONGEST_RUN
    ) -> Ended:
        """Runs Python with `words` in a folder and waits for its end; nothing of it is left when its time is over.

        Raises:
            Failed: it ran longer than `most` seconds.
            OutOfTime: the section's time was over before or while it ran.
        """
        with self.place():
            return self._run(words, folder, variables, most)

    def _run(self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None, most: float) -> Ended:
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
        environment |= {"NCCL_DEBUG": "VERSION", "PYTHONUTF8": "1"}
        # A run may import what makes its steps slow, or watches them.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        if self.is_shared:
            # Each of several runs has a thread for each core, which would spin where it waits for work.
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment |= variables or {}
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


def _finished(folder: Path) -> Training | None:
    """The run in a folder, where this proof has trained it in another process; None if it has not finished."""
    if not folder.is_dir():
        return None
    run = Training(folder)
    try:
        return run if run.status == "FINISHED" else None
    except Failed:
        return None


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
