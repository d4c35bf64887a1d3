"""Takes the queue's decisions and carries them out, each run exactly once, whenever the service is killed.

The intent to start a job is committed before anything is started. Starting is repeated until there is an answer; of all
processes that this may make, one becomes the run (`ortlaunch.serve.runner`). A restarted service finds the intents and
the processes' numbers in its database, and goes on from there. Runs do not end with the service.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from ortlaunch.base.text import printable
from ortlaunch.run.identity import Process, is_alive, machine
from ortlaunch.run.journal import read_chunk
from ortlaunch.run.run import Run
from ortlaunch.run.state import RunState
from ortlaunch.serve.actor import AT_ONCE, Actor, Refused
from ortlaunch.serve.allowance import capacity
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.kept import kept
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.scheduling import Plan, amount
from ortlaunch.serve.queue.slots import Slots, gpus_of
from ortlaunch.serve.queue.tables import OPEN_STATES, Job, JobState
from ortlaunch.serve.service import Service
from ortlaunch.serve.threads import Threads
from ortlaunch.serve.unfit import Unavailable

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 1.0
_SCHEDULER_SECONDS = 5.0
"""How often the schedulers' jobs of one Unix user are looked at."""
_AGAIN_SECONDS = 5.0
"""After this time, what gave no answer is tried again."""
_DISK_SECONDS = 30.0
"""How often the folder of a run whose disk is limited is measured."""
_STOP_SECONDS = 30.0
"""How often a run that was asked to stop and has not ended is looked at."""
_MOST_ATTEMPTS = 3
_MOST_ASKED = 50
"""So many runs are looked at by one child, whose time is bounded."""

_MOST_NOTED = 1000
"""Tasks that may begin again are forgotten when there are more: each job has some, and a service runs for years."""
_PIECE = 1 << 20
"""So many bytes of a journal are held at once."""
_NOT_BEGUN = "stopped before it began"
_UNREADABLE = "unknown"
"""The state of a run that cannot be read now."""


@dataclass
class Queue:
    """The queue of one service. One thread decides; some others wait for the children that act.

    The children of each Unix user have threads of their own, so that one whose home hangs stops nobody else's runs.
    """

    engine: Engine
    actor: Actor
    slots: Slots
    secrets: Path
    """The folder with the secrets of runs."""
    capacity: dict[str, float] = field(default_factory=dict)
    """What this machine has beside its slots."""
    plan: Plan = field(default_factory=Plan)
    """The latest decision."""
    _again: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a task may be begun again, by its name and what it is about."""
    _deciding: threading.Lock = field(default_factory=threading.Lock)
    _beginning: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _pools: dict[tuple[str, str], Threads] = field(default_factory=dict)
    """The threads by Unix user and lane. A stop takes minutes, and keeps no start waiting."""
    _is_open: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Goes on with what an earlier service has left, and begins to decide."""
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the threads; runs go on."""
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(10)
        with self._beginning:
            self._is_open = False
            self._pools.clear()

    def wake(self) -> None:
        """Decides soon, because something has changed."""
        self._wake.set()

    def decide(self) -> None:
        """Decides at once, for somebody who waits to hear it."""
        if not self._is_open:
            return
        try:
            self._decide()
        except OperationalError:
            # The database is busy; the job is in it already, and the next turn decides.
            self.wake()

    def settle(self, job_id: str, seconds: float) -> Job | None:
        """Waits for the end of a job whose run is ending, and notes it.

        Args:
            job_id: the job.
            seconds: the longest wait.

        Returns:
            The job while it is not over; None if it is.
        """
        deadline = time.monotonic() + seconds
        seen: _Seen | None = None
        while True:
            with reading(self.engine) as session:
                job = session.get_one(Job, job_id)
            if job.state not in OPEN_STATES:
                return None
            seen = seen or _Seen(Run(Path(job.run_dir)))
            is_ending = job.state == JobState.RUNNING and (not has_process(job) or seen.has_ended(job.begun_before))
            if not is_ending or not self._is_open or time.monotonic() > deadline:
                return job
            self.wake()
            time.sleep(0.1)

    def stop_for(self, job_id: str, reason: str, *, at_once: bool = False) -> None:
        """Stops a run that takes more than it may.

        Args:
            job_id: its job.
            reason: what it has taken, for its owner.
            at_once: whether to end it without a checkpoint.
        """
        with writing(self.engine) as session:
            job = session.get_one(Job, job_id)
            if job.state == JobState.RUNNING and job.stop_asked is None:
                job.stop_asked, job.reason = time.time(), reason
                record(session, None, "run.stop", job.id, {"reason": reason})
        if at_once:
            self._task("end", job.id, job.unix_user, partial(self._stop, at_once=True), job, pause=_STOP_SECONDS)
        self.wake()

    def positions(self) -> dict[str, int]:
        """Returns the place of each waiting job in the order of their starts, from 1."""
        return {name: place for place, name in enumerate(self.plan.order, start=1)}

    def slate(self) -> store.Slate:
        """Returns the slots as they are now."""
        return store.Slate(self.slots.names(), self.slots.withheld())

    def _run(self) -> None:
        # The first answer of nvidia-smi may take long: it is there when somebody asks.
        self.slots.names()
        while not self._over.is_set():
            try:
                self.turn()
            except Exception:
                # A full disk or a locked database passes; the queue must go on then.
                _log.exception("the queue could not decide, and tries again")
            self._wake.wait(_ROUND_SECONDS)
            self._wake.clear()

    def turn(self) -> None:
        """Looks once at everything that may have changed."""
        with reading(self.engine) as session:
            starting = store.in_states(session, JobState.STARTING)
            running = store.in_states(session, JobState.RUNNING)
            has_waiting = bool(store.in_states(session, JobState.WAITING))
        for job in starting:
            self._task("start", job.id, job.unix_user, self._start, job.id)
        self._look_at(running)
        for job in running:
            if job.stop_asked is not None or _is_too_long(job):
                self._task("stop", job.id, job.unix_user, self._stop, job, pause=_STOP_SECONDS)
            elif "disk" in job.limits:
                self._task("disk", job.id, job.unix_user, self._measure, job, pause=_DISK_SECONDS)
        if has_waiting:
            self._decide()
        elif self.plan.order:
            self.plan = Plan()

    def _decide(self) -> None:
        slate = self.slate()
        with self._deciding, writing(self.engine) as session:
            self.plan, starts = store.decide(session, slate, self.capacity, time.time(), self.plan.head)
        for job in starts:
            self._task("start", job.id, job.unix_user, self._start, job.id)

    def _look_at(self, running: list[Job]) -> None:
        """Asks how the runs are whose processes have ended, and those of schedulers."""
        by_user: dict[tuple[str, str], list[Job]] = {}
        for job in running:
            if job.pid is None:
                by_user.setdefault(("scheduler", job.unix_user), []).append(job)
            elif not has_process(job):
                by_user.setdefault(("ended", job.unix_user), []).append(job)
        for (kind, user), jobs in by_user.items():
            pause = _SCHEDULER_SECONDS if kind == "scheduler" else 1.0
            self._task(kind, user, user, self._ask, user, jobs, pause=pause)

    def _task(
        self,
        kind: str,
        about: str,
        unix_user: str,
        function: Callable[..., None],
        *words: Any,
        pause: float = _AGAIN_SECONDS,
    ) -> None:
        """Runs a function in a thread of a Unix user's, unless it runs already or has just failed."""
        key = kind, about

        def work() -> None:
            # What has waited for a thread up to the end of the service begins no more.
            if not self._is_open:
                return
            try:
                function(*words)
            except Unavailable as error:
                _log.warning("%s %s: %s", kind, about, error)
            except Exception:
                _log.exception("%s %s", kind, about)
            finally:
                with self._beginning:
                    self._again[key] = time.monotonic() + pause

        # The thread that decides and those of requests come here.
        with self._beginning:
            now = time.monotonic()
            if not self._is_open or self._again.get(key, 0.0) > now:
                return
            if len(self._again) > _MOST_NOTED:
                self._again = {one: when for one, when in self._again.items() if when > now}
            self._again[key] = float("inf")
            self._pool_of(unix_user, kind).submit(work)

    def _pool_of(self, unix_user: str, kind: str) -> Threads:
        lane = unix_user, kind if kind in ("stop", "end") else "queue"
        if lane not in self._pools:
            self._pools[lane] = Threads(AT_ONCE, "queue-act")
        return self._pools[lane]

    def _start(self, job_id: str) -> None:
        with reading(self.engine) as session:
            job = session.get(Job, job_id)
        if job is None or job.state != JobState.STARTING:
            return
        request = {
            **_names_of(job),
            "words": job.words,
            "launcher": job.launcher,
            "run_key": job.run_key,
            # On the CPU of a machine with GPUs it sees none of them.
            "gpus": [] if job.is_here and not job.taken else gpus_of(job.taken),
            "stopped": job.stop_asked is not None,
            "secrets": kept(self.secrets, job.run_dir),
            "memory": job.limits.get("memory"),
        }
        try:
            answer = self.actor.call(job.unix_user, "start", request)
        except Refused as error:
            self._end(job_id, JobState.REFUSED, reason=error.message)
            return
        except Unavailable as error:
            self._explain(job_id, f"not started yet, and tried again: {error}")
            raise
        if answer.get("withdrawn"):
            self._end(job_id, JobState.CANCELLED, reason=job.reason or _NOT_BEGUN)
            return
        process = Process.stored(answer["process"])
        with writing(self.engine) as session:
            job = session.get_one(Job, job_id)
            if job.state != JobState.STARTING:
                return
            job.state, job.reason = JobState.RUNNING, ""
            if process is not None:
                job.pid, job.ticks, job.machine = process.pid, process.start_ticks, process.machine
        self.wake()

    def _explain(self, job_id: str, reason: str) -> None:
        """Notes why a job has not started yet, for its owner. What is said of a job that is to stop is kept."""
        with writing(self.engine) as session:
            job = session.get_one(Job, job_id)
            if job.state == JobState.STARTING and job.stop_asked is None:
                job.reason = reason

    def _ask(self, unix_user: str, jobs: list[Job]) -> None:
        """Notes how jobs have ended."""
        for first in range(0, len(jobs), _MOST_ASKED):
            some = jobs[first : first + _MOST_ASKED]
            request = {"jobs": [{"id": job.id, **_names_of(job)} for job in some]}
            try:
                found = self.actor.call(unix_user, "outcome", request)["jobs"]
            except Unavailable as error:
                # Those that took too long keep no others from their answers.
                _log.warning("outcome %s: %s", unix_user, error)
                continue
            except Refused as error:
                # The user was taken from the list. A run whose process has ended keeps its slots no longer.
                _log.warning("outcome %s: %s", unix_user, printable(error.message))
                for job in some:
                    if job.pid is not None:
                        self._end(job.id, JobState.ENDED, outcome="killed", reason=error.message)
                continue
            for job in some:
                self._note(job, found[job.id])
        self.wake()

    def _note(self, job: Job, found: dict[str, Any]) -> None:
        if found["began"]:
            if found["is_over"]:
                self._end(job.id, JobState.ENDED, outcome=found["state"], reason=found["reason"])
            elif found["state"] == _UNREADABLE and job.pid is not None and job.stop_asked is not None:
                # Its process has ended. Nobody knows how, and its owner waits no longer.
                self._end(job.id, JobState.ENDED, outcome="killed", reason="its run folder cannot be read")
        elif found["refusal"]:
            self._end(job.id, JobState.REFUSED, reason=found["refusal"])
        elif job.stop_asked is not None:
            self._end(job.id, JobState.CANCELLED, reason=_NOT_BEGUN)
        elif job.pid is None:
            # A scheduler has the job: only its run folder is away for a moment.
            return
        elif job.resumes or job.attempts >= _MOST_ATTEMPTS:
            self._end(job.id, JobState.REFUSED, reason="its process was ended from outside before the run began")
        else:
            self._start_again(job.id)

    def _start_again(self, job_id: str) -> None:
        """Its process was ended before the run began, for example because the machine was: nothing has run yet."""
        with writing(self.engine) as session:
            job = session.get_one(Job, job_id)
            if job.state == JobState.RUNNING:
                job.state, job.attempts, job.pid, job.ticks = JobState.STARTING, job.attempts + 1, None, None

    def _end(self, job_id: str, state: JobState, *, outcome: str = "", reason: str = "") -> None:
        with writing(self.engine) as session:
            job = session.get_one(Job, job_id)
            if job.state in (JobState.STARTING, JobState.RUNNING):
                # Why it was stopped may not have come into its folder.
                if job.reason not in reason:
                    reason = f"{job.reason}; {reason}" if reason else job.reason
                store.note_end(session, job, state, outcome=outcome, reason=reason)
        self.wake()

    def _measure(self, job: Job) -> None:
        """Stops a run whose folder holds more than it may."""
        size, most = _size_of(Path(job.run_dir)), job.limits["disk"]
        if size > most:
            self.stop_for(job.id, f"it had taken {amount('disk', size)}, and may take {amount('disk', most)}")

    def _stop(self, job: Job, *, at_once: bool = False) -> None:
        """Asks a run to stop with a checkpoint, or ends it."""
        process = {"host": socket.gethostname(), "pid": job.pid, "start_ticks": job.ticks, "machine": job.machine}
        try:
            request = {"run_dir": job.run_dir, "process": process, "begun_before": job.begun_before}
            request |= {"now": at_once, "reason": job.reason}
            self.actor.call(job.unix_user, "cancel", request)
        except Refused as error:
            _log.warning("stop %s: %s", job.id, printable(error.message))


def make_queue(service: Service) -> Queue:
    """Returns the queue of a service."""
    return Queue(service.engine, service.actor, Slots(service.settings.slots), service.settings.secrets, capacity())


def _size_of(folder: Path) -> int:
    """The bytes on the disk of what is below a folder. Links are not followed."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += Path(place, name).lstat().st_blocks * 512
    return size


def _names_of(job: Job) -> dict[str, Any]:
    return {
        "run_dir": job.run_dir,
        "token": job.token,
        "attempt": job.attempts,
        "resumes": job.resumes,
        "begun_before": job.begun_before,
    }


def has_process(job: Job) -> bool:
    """Whether the process that became the run is alive. A later process with its number is another one."""
    if job.pid is None or job.ticks is None:
        return False
    return job.machine in ("", machine()) and is_alive(job.pid, job.ticks)


@dataclass
class _Seen:
    """A run's journal up to where it was read. Each look takes only what is new."""

    run: Run
    state: RunState = field(default_factory=RunState)
    offset: int = 0

    def has_ended(self, begun_before: int) -> bool:
        """Whether the run says that it has ended; its process may still send the record.

        Args:
            begun_before: how often the run had begun before this job.
        """
        try:
            while (chunk := read_chunk(self.run.journal_file, self.offset, _PIECE)).offset > self.offset:
                for event in chunk.events:
                    self.state.take(event)
                self.offset = chunk.offset
        except OSError:
            return False
        self.run.take_kept_end(self.state)
        return self.state.ended is not None and self.state.attempts > begun_before


def _is_too_long(job: Job) -> bool:
    """Whether a run on slots is beyond its limit. A scheduler's job may still wait there, and has a limit there."""
    if job.minutes is None or job.started is None or not job.is_here:
        return False
    return store.seconds_run(job, time.time()) > 60 * job.minutes
