"""The jobs of the queue as the list knows them, and the state that is shown of a run and its job together."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import Engine, select

from ortlaunch.follow.state import State
from ortlaunch.serve.database import reading
from ortlaunch.serve.index.reading import Listed
from ortlaunch.serve.queue.tables import OPEN_STATES, Job, JobState

_RUNNING, _STOPPING, _STOPPED, _KILLED, _UNKNOWN = (
    one.value for one in (State.RUNNING, State.STOPPING, State.STOPPED, State.KILLED, State.UNKNOWN)
)
_BEFORE_RUNNING = (JobState.WAITING, JobState.STARTING)
_WITHOUT_RUN = (*OPEN_STATES, JobState.REFUSED, JobState.CANCELLED)
"""States of jobs that are rows of their own while there is no run folder."""


class QueueJob(NamedTuple):
    """One job of the queue; see `ortlaunch.serve.queue.tables.Job`."""

    number: int
    id: str
    run_dir: str
    run_id: str
    run_key: str
    name: str
    experiment: str
    owner: str
    state: str
    reason: str
    outcome: str
    resumes: bool
    priority: int
    steps: int | None
    submitted: float
    started: float | None
    ended: float | None
    stop_asked: float | None
    project: str = ""
    sweep: str | None = None
    request: Mapping[str, Any] = MappingProxyType({})


_COLUMNS = tuple(getattr(Job, name) for name in QueueJob._fields)


class OfRun(NamedTuple):
    """The jobs of one run folder."""

    latest: QueueJob
    begun: QueueJob | None
    """The latest one that has begun. One that still waits to go on is not the run's yet."""


class QueueJobs:
    """All jobs in memory. The database is asked for those that are new, and for those that may have changed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._of_runs: dict[str, OfRun] = {}
        self._open: set[int] = set()
        self._newest = 0

    def now(self) -> dict[str, OfRun]:
        """Returns the jobs of each run folder."""
        with self._lock:
            with reading(self._engine) as session:
                # One that was open when it was read last may be over now.
                may_differ = Job.state.in_(OPEN_STATES) | (Job.number > self._newest) | Job.number.in_(self._open)
                found = session.execute(select(*_COLUMNS).where(may_differ).order_by(Job.number)).all()
            for one in map(QueueJob._make, found):
                known = self._of_runs.get(one.run_dir)
                latest = one if known is None or one.number >= known.latest.number else known.latest
                begun = known.begun if known is not None else None
                if one.started is not None and (begun is None or one.number >= begun.number):
                    begun = one
                self._of_runs[one.run_dir] = OfRun(latest, begun)
                self._newest = max(self._newest, one.number)
            self._open = {one.number for one in map(QueueJob._make, found) if one.state in OPEN_STATES}
            return dict(self._of_runs)


def shown_state(run: Listed | None, jobs: OfRun | None) -> tuple[str, str] | None:
    """Returns the state that is shown, and why; None if nothing is: the folder of a run that had begun is gone.

    The queue knows earlier than the folder that a run begins, and later that it is over. As long as it has not found
    out that a run is over, what the folder cannot say is no end: it starts, waits, or goes on.

    Args:
        run: the run as its folder and its scheduler say; None while there is no folder.
        jobs: its jobs; None for a run from a command line.
    """
    job = jobs.latest if jobs is not None else None
    if run is None:
        if job is None or job.state not in _WITHOUT_RUN:
            return None
        return (JobState.STARTING if job.state == JobState.RUNNING else job.state), job.reason
    if jobs is None or job is None:
        return run.state, run.reason
    if job.state in _BEFORE_RUNNING:
        return job.state, job.reason
    if job.state == JobState.RUNNING:
        return _while_it_runs(run, job)
    begun = _seen_end(run, jobs)
    if begun is not None and run.state == _STOPPED:
        # The queue also knows what the run had taken too much of.
        return run.state, begun.reason
    lost = lost_by(run, jobs)
    return (run.state, run.reason) if lost is None else (lost.outcome, lost.reason)


def lost_by(run: Listed, jobs: OfRun | None) -> QueueJob | None:
    """Returns the job whose end was found out by the queue alone; None where the folder tells the run's end.

    A run whose launcher is gone with its container or machine never says that it has ended.
    """
    return None if run.has_end else _seen_end(run, jobs)


def _seen_end(run: Listed, jobs: OfRun | None) -> QueueJob | None:
    """The job that is over, if the run was not continued after it, for example from a command line elsewhere."""
    begun = jobs.begun if jobs is not None else None
    return begun if begun is not None and begun.outcome and (begun.ended or 0) >= run.updated else None


def _while_it_runs(run: Listed, job: QueueJob) -> tuple[str, str]:
    is_of_before = job.resumes and run.is_over and job.started is not None and run.updated < job.started
    if is_of_before or (not run.has_end and run.step is None and run.state in (_UNKNOWN, _KILLED)):
        return JobState.STARTING, job.reason
    if job.stop_asked is not None and run.state == _RUNNING:
        return _STOPPING, job.reason
    if not run.has_end and run.state == _KILLED:
        return _RUNNING, ""
    return run.state, run.reason
