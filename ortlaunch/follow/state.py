"""In which state a run is, in words for people: from its folder, its process on this machine, and SLURM."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ortlaunch.launch.slurm.query import Job, Queue
from ortlaunch.run.liveness import Alive, Liveness, liveness
from ortlaunch.run.record import Record
from ortlaunch.run.run import Run
from ortlaunch.run.state import REASON_TAG, STATE_TAG


class State(Enum):
    """What a run is doing."""

    QUEUED = "queued"
    """Submitted, and SLURM does not say more."""
    PENDING = "pending"
    """Waits for its first start; the reason says for what."""
    REQUEUED = "requeued"
    """Waits to go on, after a time limit, a lost node or a failure that is tried again."""
    PREEMPTED = "preempted"
    """Had to make room for another job; goes on when it is its turn, or can be resumed."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Was asked to stop and writes its checkpoint."""
    STOPPED = "stopped"
    """Ended by request with a checkpoint: `ortlaunch resume` goes on."""
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    """Ended from outside, with no checkpoint of its last step."""
    UNKNOWN = "unknown"


ACTIVE = frozenset({State.QUEUED, State.PENDING, State.REQUEUED, State.RUNNING, State.STOPPING})
"""States of runs that are not over."""


@dataclass(frozen=True)
class Standing:
    """A run's state and why."""

    state: State
    reason: str = ""
    """In a few words; empty where the state says all."""
    is_over: bool = True
    """Whether nothing but a new launch can change it."""


_SUBMISSION_SECONDS = 600.0

_REASONS = {
    "Priority": "others come first",
    "Resources": "waits for free nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job it waits for failed: it will never start",
    "JobArrayTaskLimit": "as many of its sweep run as may",
    "JobHeldUser": "held by you",
    "JobHeldAdmin": "held by an administrator",
    "BeginTime": "waits for its start time",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a license",
    "ReqNodeNotAvail": "a node that it asked for is not available",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "more nodes than the partition gives",
    "PartitionTimeLimit": "more time than the partition gives",
    "BadConstraints": "no node is as it asks",
    "NodeDown": "a node that it asked for is down",
    "Cleaning": "its last start is being cleaned up",
    "launch failed requeued held": "could not be started on its node, and is held",
}
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_GOING = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED")
_ENDS = {
    "TIMEOUT": (State.KILLED, "its time limit"),
    "DEADLINE": (State.KILLED, "its deadline"),
    "NODE_FAIL": (State.KILLED, "a node failed"),
    "BOOT_FAIL": (State.KILLED, "a node did not boot"),
    "OUT_OF_MEMORY": (State.FAILED, "out of memory on a node"),
    "PREEMPTED": (State.PREEMPTED, "another job took its nodes"),
    "REVOKED": (State.KILLED, "another cluster took it"),
}


def words_for(reason: str) -> str:
    """SLURM's reason why a job waits, in plain words; its own where we have none."""
    head = reason.partition(",")[0].strip("()")
    if head in _REASONS:
        return _REASONS[head]
    if match := re.fullmatch(r"(QOS|Assoc)(Max|Grp)(.*)", head):
        owner = "its QOS" if match[1] == "QOS" else "its account"
        return f"{owner} is at its limit ({head})"
    return head


def judge(record: Record, queue: Queue, accounts: Queue) -> Standing:
    """The state of a run.

    Args:
        record: what its folder says.
        queue: SLURM's controller.
        accounts: SLURM's accounting database; asked only about jobs that the controller does not know.
    """
    if record.job is not None:
        return _of_job(record, queue, accounts)
    return _of_process(record)


def may_be_active(run: Run, job_id: str | None, queue: Callable[[], Queue]) -> bool:
    """Whether a run may go on, from what is quickest to know; only the rest of its folder tells for sure.

    Args:
        run: the run.
        job_id: its job, where it has one.
        queue: asks SLURM.
    """
    if job_id is not None:
        asked = queue()
        job = asked.find(job_id)
        return bool(asked.problem) if job is None else job.state in (*_WAITING, *_GOING)
    launcher = run.launcher()
    return launcher is not None and (not launcher.is_here or launcher.lives)


def _of_process(record: Record) -> Standing:
    if record.ended is not None:
        return _ended(record)
    if record.launcher is None and record.tags.get(STATE_TAG) == "queued":
        return _in_submission(record)
    found = liveness(record.run, record.launcher)
    if found.alive is Alive.LAUNCHER:
        return _going(record)
    if found.launcher is not None and not found.launcher.is_here:
        return _silent(record, found)
    return (
        Standing(State.KILLED, "its launcher is gone") if record.state.last else Standing(State.UNKNOWN, "never began")
    )


def _in_submission(record: Record) -> Standing:
    """A run of SLURM that has no job yet: MLflow is told of it first, which may take a slow server some time."""
    if time.time() - (record.state.last or 0) / 1000 < _SUBMISSION_SECONDS:
        return Standing(State.QUEUED, "is being submitted", is_over=False)
    return Standing(State.KILLED, "its submission was broken off")


def _silent(record: Record, found: Liveness) -> Standing:
    """A launcher on another machine that gives no sign of life."""
    assert found.launcher is not None
    if found.alive is Alive.MAYBE:
        return _going(record)
    quiet = f"no word from {found.launcher.host} for {found.quiet_seconds / 3600:.1f} h"
    return Standing(State.UNKNOWN, quiet, is_over=False)


def _going(record: Record, reason: str = "") -> Standing:
    if record.stop is not None:
        why = "" if record.stop == "cancel" else record.stop
        return Standing(State.STOPPING, why or reason, is_over=False)
    return Standing(State.RUNNING, reason or ("starting" if record.step is None else ""), is_over=False)


def _ended(record: Record) -> Standing:
    if record.ended == "FINISHED":
        return Standing(State.FINISHED)
    if record.ended == "FAILED":
        return Standing(State.FAILED, record.state.failure)
    if record.stopped_step is not None:
        return Standing(State.STOPPED, f"at step {record.stopped_step}")
    return Standing(State.KILLED)


def _of_job(record: Record, queue: Queue, accounts: Queue) -> Standing:
    job = queue.find(record.job_id or "")
    if job is not None and job.state in _WAITING:
        return _waiting(record, job)
    if job is not None and job.state in _GOING:
        over = record.ended is not None and job.state == "COMPLETING"
        return _ended(record) if over else _going(record, _remark(job))
    job = job or accounts.find(record.job_id or "")
    if record.ended is not None:
        return _refined(_ended(record), job)
    if job is not None and job.state not in (*_WAITING, *_GOING):
        return _by_scheduler(record, job)
    if record.done:
        return Standing(State.FINISHED)
    if queue.problem:
        return Standing(State.UNKNOWN if record.step else State.QUEUED, queue.problem, is_over=False)
    if record.stopped_step is not None:
        return Standing(State.STOPPED, f"at step {record.stopped_step}")
    gone = f"SLURM no longer knows job {record.job_id}"
    # Its batch script would have said that it began.
    began = STATE_TAG not in record.tags or record.tags[STATE_TAG] != "queued"
    return Standing(State.UNKNOWN, gone, is_over=False) if began else Standing(State.KILLED, gone, is_over=False)


def _waiting(record: Record, job: Job) -> Standing:
    why = words_for(job.reason)
    if not job.restarts and job.state == "PENDING":
        return Standing(State.PENDING, why, is_over=False)
    cause = record.tags.get(REASON_TAG, "")
    state = State.PREEMPTED if cause.startswith("preempt") else State.REQUEUED
    return Standing(state, "; ".join(part for part in (cause, why) if part), is_over=False)


def _remark(job: Job) -> str:
    if job.state in ("SUSPENDED", "STOPPED"):
        return "suspended by SLURM"
    return "its nodes boot" if job.state == "CONFIGURING" else ""


def _refined(standing: Standing, job: Job | None) -> Standing:
    """A run that was killed, with the scheduler's reason for it."""
    if standing.state is State.KILLED and job is not None and job.state in _ENDS:
        return Standing(*_ENDS[job.state])
    return standing


def _by_scheduler(record: Record, job: Job) -> Standing:
    """The run could not say itself how it ended."""
    if record.done:
        return Standing(State.FINISHED)
    if record.stopped_step is not None:
        return Standing(State.STOPPED, f"at step {record.stopped_step}")
    if job.state in _ENDS:
        return Standing(*_ENDS[job.state])
    if job.state == "CANCELLED" and job.reason.startswith("DependencyNeverSatisfied"):
        return Standing(State.KILLED, "the run it waited for did not finish")
    if job.state == "CANCELLED":
        return Standing(State.KILLED, "cancelled" if record.step is not None else "cancelled before it began")
    why = words_for(job.reason) if job.reason not in ("", "None", "NonZeroExitCode") else "see logs/slurm.log"
    return Standing(State.FAILED, record.state.failure or why)
