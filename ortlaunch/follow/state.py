"""Tells in which state a run is, from its folder, its process on this machine, and its scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from ortlaunch.launch.jobs import End, Job, Phase
from ortlaunch.run.liveness import Alive, Liveness, liveness
from ortlaunch.run.record import Record
from ortlaunch.run.run import Run
from ortlaunch.run.state import ENDED_TAG, REASON_TAG, SCRIPT_TAG, STATE_TAG


class State(Enum):
    """What a run is doing."""

    QUEUED = "queued"
    """It was submitted, and its scheduler says no more."""
    PENDING = "pending"
    """It waits for its first start; the reason says for what."""
    REQUEUED = "requeued"
    """It waits to go on, after a time limit, a lost node or a failure that is retried."""
    PREEMPTED = "preempted"
    """It had to leave its nodes to another job. It goes on when it is its turn, or can be resumed."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was asked to stop and writes its checkpoint."""
    STOPPED = "stopped"
    """It ended on request with a checkpoint, or before its first step. `ortlaunch resume` goes on."""
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    """It was ended from outside, without a checkpoint of its last step."""
    UNKNOWN = "unknown"


ACTIVE = frozenset({State.QUEUED, State.PENDING, State.REQUEUED, State.RUNNING, State.STOPPING})
"""States of runs that are not over."""


@dataclass(frozen=True)
class Standing:
    """A run's state and why."""

    state: State
    reason: str = ""
    """A short text; empty if the state says all."""
    is_over: bool = True
    """Whether only a new launch can change it."""


_SUBMISSION_SECONDS = 600.0

_ENDS = {End.KILLED: State.KILLED, End.FAILED: State.FAILED, End.PREEMPTED: State.PREEMPTED}


@dataclass(frozen=True)
class SchedulerView:
    """A run's job, as its scheduler sees it."""

    title: str
    """The scheduler's name in messages."""
    log: str
    """Name, without ``.log``, of the file in ``logs/`` that takes the output of the job's first process."""
    job: Job | None = None
    """The run's job; None if the scheduler does not know it."""
    past: Job | None = None
    """The job in the scheduler's accounting, which is asked only if `job` is None."""
    problem: str = ""
    """Why the scheduler could not be asked; empty if it has answered."""


def judge(record: Record, view: SchedulerView | None) -> Standing:
    """Returns the state of a run.

    Args:
        record: the record from its folder.
        view: its job as the scheduler sees it; None for a run that is no job.
    """
    if view is not None:
        return _of_job(record, view)
    return _of_process(record)


def may_be_active(job: Job | None, problem: str) -> bool:
    """Returns whether the run of a job may go on, by a quick check. Only the rest of its folder tells for sure.

    Args:
        job: the job; None if its scheduler does not know it.
        problem: why the scheduler could not be asked.
    """
    return bool(problem) if job is None else job.lives


def launcher_may_live(run: Run) -> bool:
    """Returns whether a run that is no job may go on, by a quick check."""
    launcher = run.launcher()
    return launcher is not None and (not launcher.is_here or launcher.lives)


def _of_process(record: Record) -> Standing:
    if record.ended is not None:
        return _ended(record)
    if record.launcher is None and record.tags.get(STATE_TAG) == "queued":
        return _in_submission(record)
    found = liveness(record.run, record.launcher)
    if found.alive is Alive.LAUNCHER:
        return _running_or_stopping(record)
    if record.done:
        return Standing(State.FINISHED)
    if found.launcher is not None and not found.launcher.is_here:
        return _launched_elsewhere(record, found)
    return (
        Standing(State.KILLED, "its launcher is gone") if record.state.last else Standing(State.UNKNOWN, "never began")
    )


def _in_submission(record: Record) -> Standing:
    """Judges a run that has no job yet. It is sent to MLflow before the submission, which a slow server may delay."""
    if time.time() - (record.state.last or 0) / 1000 < _SUBMISSION_SECONDS:
        return Standing(State.QUEUED, "is being submitted", is_over=False)
    return Standing(State.KILLED, "its submission was interrupted")


def _launched_elsewhere(record: Record, found: Liveness) -> Standing:
    """Judges a run whose launcher is on another machine, where its process cannot be seen."""
    assert found.launcher is not None
    if found.alive is Alive.MAYBE:
        return _running_or_stopping(record)
    # Machines may have one name by mistake, so the silence counts too.
    if found.launcher.is_of_earlier_boot:
        return Standing(State.KILLED, "its machine was restarted")
    quiet = f"no sign of life from {found.launcher.host} for {found.quiet_seconds / 3600:.1f} h"
    return Standing(State.UNKNOWN, quiet, is_over=False)


def _running_or_stopping(record: Record, reason: str = "") -> Standing:
    if record.stop is not None:
        why = "" if record.stop == "cancel" else record.stop
        return Standing(State.STOPPING, why or reason, is_over=False)
    return Standing(State.RUNNING, reason or _starting(record), is_over=False)


def _starting(record: Record) -> str:
    # Nobody knows the steps of a script.
    return "starting" if record.step is None and SCRIPT_TAG not in record.tags else ""


def _ended(record: Record) -> Standing:
    if record.ended == "FINISHED":
        return Standing(State.FINISHED)
    if record.ended == "FAILED":
        return Standing(State.FAILED, record.state.failure)
    if record.stopped_step is not None:
        return _stopped(record, record.stopped_step)
    return Standing(State.KILLED, record.tags.get(ENDED_TAG, ""))


def _stopped(record: Record, step: int) -> Standing:
    """Returns the state of a run that was stopped at a step; 0 means that it had made none, or is a script."""
    before = "" if SCRIPT_TAG in record.tags else "before its first step"
    parts = (f"at step {step}" if step else before, record.tags.get(ENDED_TAG, ""))
    return Standing(State.STOPPED, ": ".join(filter(None, parts)))


def _of_job(record: Record, view: SchedulerView) -> Standing:
    if view.job is not None and view.job.lives:
        return _of_living_job(record, view.job)
    job = view.job or view.past
    if record.ended is not None:
        return _with_scheduler_reason(_ended(record), job)
    if job is not None and not job.lives:
        return _of_ended_job(record, job, view)
    return _of_unknown_job(record, view)


def _of_living_job(record: Record, job: Job) -> Standing:
    if job.phase is Phase.WAITING:
        return _waiting(record, job)
    if job.phase is Phase.LEAVING and record.ended is not None:
        return _ended(record)
    return _running_or_stopping(record, job.reason)


def _of_unknown_job(record: Record, view: SchedulerView) -> Standing:
    """Judges a run that has journalled no end, by its folder: the scheduler could not be asked, or has no answer."""
    if record.done:
        return Standing(State.FINISHED)
    if view.problem:
        return Standing(State.UNKNOWN if record.step else State.QUEUED, view.problem, is_over=False)
    if record.stopped_step is not None:
        return _stopped(record, record.stopped_step)
    # A job that has begun has changed this tag. One that has not was cancelled, and will not begin: without accounting,
    # its scheduler forgets that after some minutes.
    has_begun = record.tags.get(STATE_TAG) != "queued"
    reason = f"{view.title} no longer knows job {record.job_id}"
    if has_begun:
        return Standing(State.UNKNOWN, reason, is_over=False)
    # A new job may not be listed yet, and that of another cluster is not listed here.
    job = record.job or {}
    submitted = job.get("submitted")
    is_old = isinstance(submitted, float) and time.time() - submitted > _SUBMISSION_SECONDS
    is_over = is_old and not job.get("cluster")
    return Standing(State.KILLED, f"{reason}, which had not begun", is_over=is_over)


def _waiting(record: Record, job: Job) -> Standing:
    if not job.waits_again:
        return Standing(State.PENDING, job.reason, is_over=False)
    cause = record.tags.get(REASON_TAG, "")
    state = State.PREEMPTED if cause.startswith("preempt") else State.REQUEUED
    return Standing(state, "; ".join(part for part in (cause, job.reason) if part), is_over=False)


def _with_scheduler_reason(standing: Standing, job: Job | None) -> Standing:
    """Returns the state of a run, for a killed one with the scheduler's reason."""
    if standing.state is State.KILLED and job is not None and job.end in _ENDS:
        return Standing(_ENDS[job.end], job.reason)
    return standing


def _of_ended_job(record: Record, job: Job, view: SchedulerView) -> Standing:
    """Judges a run that could not journal its end, by the end of its job."""
    if record.done:
        return Standing(State.FINISHED)
    if record.stopped_step is not None:
        return _stopped(record, record.stopped_step)
    if job.end in _ENDS:
        return Standing(_ENDS[job.end], job.reason)
    if job.end is End.CANCELLED:
        text = "cancelled" if record.step is not None else "cancelled before it began"
        return Standing(State.KILLED, job.reason or text)
    return Standing(State.FAILED, record.state.failure or job.reason or f"see logs/{view.log}.log")
