"""What this machine and each run on it take: looked at every few seconds, kept for a day, held against the limits."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy.exc import OperationalError

from ortlaunch.base.files import nearest_folder
from ortlaunch.config.devices import usable_cores
from ortlaunch.serve.access import Caller
from ortlaunch.serve.database import reading
from ortlaunch.serve.dispatcher import Queue, has_process
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.scheduling import amount
from ortlaunch.serve.queue.tables import Job, JobState
from ortlaunch.serve.service import Service

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 5.0
_KEPT_SECONDS = 60.0
"""How far the looks are apart that are kept for a day."""
_DAY = round(86400 / _KEPT_SECONDS)
_FAR = 1.25
"""A run that has so many times its memory is ended at once: a stop with a checkpoint may come too late."""


@dataclass(frozen=True)
class Taken:
    """What one run takes."""

    id: str
    name: str
    owner: str
    slots: list[str]
    cores: float
    """Cores that it keeps busy."""
    memory: int
    """Bytes, without files and memory that its processes share."""
    limits: dict[str, float]
    project: str = ""


@dataclass(frozen=True)
class Look:
    """The machine at one moment. Shares are from 0 to 1."""

    at: float
    cores: float
    """The share of the cores that is busy."""
    memory: float
    disk: float
    """Of the file system of new runs."""
    gpus: dict[str, dict[str, float]]
    """By slot: ``busy``, and the share of its ``memory``."""
    runs: list[Taken]

    def seen_by(self, caller: Caller) -> Look:
        """Returns it without the runs that somebody does not see."""
        return replace(self, runs=[run for run in self.runs if caller.sees(run.project)])


@dataclass
class Machine:
    """Looks at this machine in a thread of its own."""

    queue: Queue
    root: Path
    now: Look | None = None
    day: deque[Look] = field(default_factory=lambda: deque(maxlen=_DAY))
    """A look of each minute of the last day, since the service began."""
    _spent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When a run's process was last looked at, and the seconds that its processes had computed."""
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begins to look."""
        threading.Thread(target=self._run, name="machine", daemon=True).start()

    def stop(self) -> None:
        """Looks no more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self.look()
            except (OperationalError, OSError, psutil.Error):
                _log.exception("the machine could not be looked at, and is again")

    def look(self) -> None:
        """Looks once, and stops the runs that take more memory than they may."""
        with reading(self.queue.engine) as session:
            jobs = list(filter(has_process, store.in_states(session, JobState.RUNNING)))
        trees = _trees([job.pid for job in jobs if job.pid is not None])
        runs = [self._taken(job, trees[job.pid]) for job in jobs if job.pid is not None]
        self._spent = {pid: spent for pid, spent in self._spent.items() if pid in trees}
        disk = psutil.disk_usage(str(nearest_folder(self.root)))
        memory = psutil.virtual_memory().percent / 100
        gpus = dict(self.queue.slots.use)
        self.now = Look(time.time(), psutil.cpu_percent() / 100, memory, disk.percent / 100, gpus, runs)
        if not self.day or self.now.at - self.day[-1].at >= _KEPT_SECONDS:
            self.day.append(self.now)
        for job, run in zip(jobs, runs, strict=True):
            most = job.limits.get("memory", float("inf"))
            if run.memory > most:
                reason = f"it had taken {amount('memory', run.memory)}, and may take {amount('memory', most)}"
                self.queue.stop_for(job.id, reason, at_once=run.memory > _FAR * most)

    def _taken(self, job: Job, processes: list[psutil.Process]) -> Taken:
        assert job.pid is not None
        spent, memory = 0.0, 0
        for process in processes:
            try:
                with process.oneshot():
                    times, held = process.cpu_times(), process.memory_info()
            except psutil.Error:
                continue
            spent += times.user + times.system
            memory += max(0, held.rss - held.shared)
        now, (before, had) = time.monotonic(), self._spent.get(job.pid, (0.0, 0.0))
        self._spent[job.pid] = now, spent
        # Processes that have ended take their times along.
        cores = max(0.0, spent - had) / (now - before) if before else 0.0
        return Taken(job.run_key, job.name, job.owner, job.taken, round(cores, 2), memory, job.limits, job.project)

    def as_dict(self, minutes: int, caller: Caller) -> dict[str, Any]:
        """Returns how the machine is, and was in the last minutes.

        Args:
            minutes: how many of them.
            caller: who asks.
        """
        since = time.time() - 60 * minutes
        return {
            "cores": usable_cores(),
            "memory": psutil.virtual_memory().total,
            "now": None if self.now is None else asdict(self.now.seen_by(caller)),
            "before": [asdict(look.seen_by(caller)) for look in self.day if look.at >= since],
        }


def _trees(pids: Collection[int]) -> dict[int, list[psutil.Process]]:
    """The processes of some runs: each with all that it has started, by one look at all processes."""
    children = defaultdict[int, list[psutil.Process]](list)
    known = {process.pid: process for process in psutil.process_iter(["ppid"])} if pids else {}
    for process in known.values():
        children[process.info["ppid"]].append(process)
    found: dict[int, list[psutil.Process]] = {}
    for pid in pids:
        tree = [known[pid]] if pid in known else []
        for process in tree:
            tree += children[process.pid]
        found[pid] = tree
    return found


def make_machine(service: Service) -> Machine:
    """Returns what looks at the machine of a service."""
    return Machine(service.queue, service.settings.root.absolute())
