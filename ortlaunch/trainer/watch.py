"""Detects a worker that makes no progress, writes the stacks of all workers, and ends the run.

Each worker counts its progress in memory, and a thread writes the count to ``health/rank-N.json`` in the run folder
when it has changed. If the count does not change for too long, the thread dumps the stacks of all threads to
``stacks/rank-N.txt``, reads the counts of the other workers, records which worker stopped first, and ends the process;
torchrun then ends or restarts the other workers.

Time in which the process could not run does not count: a worker that was stopped, suspended or paused goes on. When it
does, it looks whether another launcher has taken the run over meanwhile, and ends in that case.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ortlaunch.base.awake import AwakeClock, why_not_running
from ortlaunch.base.errors import TrainingError
from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import read_text
from ortlaunch.run import claim, failure
from ortlaunch.run.identity import is_own, is_pid, machine
from ortlaunch.run.liveness import is_worker_of
from ortlaunch.run.run import Run

_POLL_SECONDS = 0.5
_WRITE_SECONDS = 2.0
_PEERS_SECONDS = 3.0
_STOOD_SECONDS = 5.0
"""A worker that could not run for this long says so in its log."""
_OWNER_SECONDS = 5.0
"""How often the first worker looks whether its launcher still has the run."""
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/", "ortlaunch/trainer/shared_memory.py")


@dataclass(frozen=True)
class Health:
    """The progress of one worker."""

    rank: int
    host: str
    pid: int
    beats: int
    """Number of times that it has reported progress."""
    step: int
    """The last step that it has finished."""
    time: float
    """When its thread wrote this, in seconds since the epoch."""
    machine: str = ""
    """As in `ortlaunch.run.identity.Process`."""


class Watch:
    """Counts a worker's progress, and ends the process if there is none for too long."""

    def __init__(self, run_dir: Path, rank: int, workers: int, *, first_seconds: float, seconds: float) -> None:
        """
        Args:
            run_dir: the run folder.
            rank: this worker's number.
            workers: the number of workers.
            first_seconds: longest time without progress before the end of the first step, which includes export and
                compilation (trainer.timeout_seconds).
            seconds: longest time without progress after it (launcher.timeout_seconds).
        """
        self._run_dir = run_dir
        self._rank = rank
        self._workers = workers
        self._first_seconds = first_seconds
        self._seconds = seconds
        self._beats = 0
        self._step: int | None = None
        self._awake = AwakeClock()
        self._moved = 0.0
        """The time of the last progress on that clock."""
        self._paused = False
        self._done = threading.Event()
        run = Run(run_dir)
        self._claim = claim.own_number(run)
        self._leave_if_lost()
        for folder in (run.health, run.stacks):
            folder.mkdir(exist_ok=True)
        # Files of an earlier attempt.
        run.stack_file(rank).unlink(missing_ok=True)
        run.beat_file(rank).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def beat(self) -> None:
        """Progress within a step."""
        self._beats += 1
        self._moved = self._awake.seconds

    def step_done(self, step: int) -> None:
        """Progress: a step is finished."""
        self._step = step
        self.beat()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends the limit within its block, for work such as writing to a slow disk; its end counts as progress."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.beat()

    def stop(self) -> None:
        """Ends the thread. The worker gives no further signs of life, and nobody is to miss them."""
        self._done.set()
        self._thread.join()
        with suppress(OSError):
            Run(self._run_dir).beat_file(self._rank).unlink(missing_ok=True)

    def _look(self) -> None:
        written, looked = -_WRITE_SECONDS, 0.0
        while not self._done.wait(_POLL_SECONDS):
            stood = self._awake.tick()
            now = self._awake.seconds
            if stood > 0.0 or (self._rank == 0 and now - looked > _OWNER_SECONDS):
                looked = now
                self._leave_if_lost()
            if stood > _STOOD_SECONDS:
                text = "this worker could not run (stopped, suspended or paused), or held Python's lock"
                print(f"ortlaunch: {text}, for {stood:.0f} s: it goes on", file=sys.stderr, flush=True)
            # Written rarely while there is progress. Without progress the count is final, and the file's time shows
            # that this process still runs, or goes on.
            if stood > _WRITE_SECONDS or self._stands_still(_WRITE_SECONDS) or now - written > _WRITE_SECONDS:
                written = now
                with suppress(OSError):
                    self._write()
            if self._stands_still(self._limit):
                self._end()

    def _leave_if_lost(self) -> None:
        """Ends this worker if another launcher has the run now. It writes nothing more, since the folder is not its."""
        if claim.number(Run(self._run_dir)) > self._claim:
            print("ortlaunch: another launcher has taken this run over: this worker ends", file=sys.stderr, flush=True)
            os._exit(1)

    @property
    def _limit(self) -> float:
        return self._first_seconds if self._step is None else self._seconds

    @property
    def _key(self) -> str:
        return "trainer.timeout_seconds" if self._step is None else "launcher.timeout_seconds"

    def _stands_still(self, seconds: float) -> bool:
        return not self._paused and self._awake.seconds - self._moved > seconds

    def _write(self) -> None:
        health = Health(
            self._rank, socket.gethostname(), os.getpid(), self._beats, self._step or 0, time.time(), machine()
        )
        replace_text(Run(self._run_dir).beat_file(self._rank), json.dumps(asdict(health)))

    def _end(self) -> None:
        stacks = Run(self._run_dir).stack_file(self._rank)
        partial = stacks.with_suffix(".partial")
        # A full disk, or a file system that fails, may be why nothing goes on. The run must end all the same.
        with suppress(OSError):
            with partial.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            partial.replace(stacks)
        with suppress(OSError):
            self._write()
        # The other workers notice at about the same time: their stacks show which of them only wait.
        time.sleep(_PEERS_SECONDS)
        # A worker that was stopped may have gone on meanwhile.
        if not self._done.is_set() and self._stands_still(self._limit):
            guilty = stuck(self._run_dir, self._workers)
            message = describe(guilty, self._limit, self._key, self._run_dir)
            failure.record(self._run_dir, guilty.rank, TrainingError(message), host=guilty.host)
            # The id comes from a file, which another one may have written.
            if _is_here(guilty) and guilty.pid != os.getpid() and self._is_peer(guilty.pid):
                # It may no longer react to torchrun's SIGTERM, and torchrun would wait for it.
                with suppress(OSError):
                    os.kill(guilty.pid, signal.SIGKILL)
            os._exit(1)

    def _is_peer(self, pid: int) -> bool:
        """Whether a process is a worker of this run, and this user's."""
        return is_pid(pid) and is_own(pid) and is_worker_of(pid, Run(self._run_dir))


def stuck(run_dir: Path, workers: int) -> Health:
    """The worker that the others wait for, according to the files of all workers.

    It is one whose process has stopped writing; else the one with the least progress; among several of these, one
    whose stack does not show it waiting for others.
    """
    everyone = [_read(run_dir, rank) for rank in range(workers)]
    latest = max(health.time for health in everyone)
    silent = [health for health in everyone if latest - health.time > _PEERS_SECONDS + 2 * _POLL_SECONDS]
    if silent:
        return silent[0]
    fewest = min(health.beats for health in everyone)
    behind = [health for health in everyone if health.beats == fewest]
    busy = [health for health in behind if not _waits(Run(run_dir).stack_file(health.rank))]
    return (busy or behind)[0]


def _read(run_dir: Path, rank: int) -> Health:
    try:
        return Health(**Run(run_dir).beat(rank))
    except TypeError:
        return Health(rank, "an unknown host", 0, 0, 0, 0.0)


def describe(guilty: Health, seconds: float, key: str, run_dir: Path) -> str:
    """The message for the user; `key` is the key that limits the time."""
    why = why_not_running(guilty.pid) if _is_here(guilty) and guilty.pid else ""
    return (
        f"no progress for {seconds:g} s ({key}): rank {guilty.rank} on {guilty.host} (process {guilty.pid}) stopped "
        f"answering after step {guilty.step}{f': {why}' if why else ''}; the stacks of the workers are in "
        f"{Run(run_dir).stacks}"
    )


def _is_here(health: Health) -> bool:
    return health.host == socket.gethostname() and health.machine == machine()


def _waits(stack: Path) -> bool:
    """Whether the main thread's stack ends in a collective, or in the backward that runs one."""
    try:
        text = read_text(stack)
    except OSError:
        return False
    main = text[text.rfind("(most recent call first):") :].splitlines()[1:4]
    return any(part in line for line in main for part in _WAITING)
