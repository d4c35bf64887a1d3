"""Decides what a job does after its workers have ended, in one place and without side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ortlaunch.base import exit_codes
from ortlaunch.run.events import Status

REQUEUE_WORD = "requeue"
"""First word of a STOP file that was written after the scheduler's warning. A user's request has another word."""


@dataclass(frozen=True)
class Facts:
    """The facts from the job's first process, the run folder and the scheduler."""

    code: int
    """Exit code of the starter."""
    signals: frozenset[str] = frozenset()
    """Any of WARNING (the end is near), TERM (SIGTERM came), LATE (the workers used up their grace period), UNFIT (the
    preflight found something) and LOST (a node does not answer)."""
    is_done: bool = False
    """Whether all steps are done and everything is written."""
    is_request: bool = False
    """Whether a worker found the request wrong."""
    has_failed: bool = False
    """Whether a worker has left the error that ended it."""
    stopped_by: str | None = None
    """Why the workers stopped together after a checkpoint: the STOP file's first word, or `signal`. None if they did
    not."""
    asked_by: str | None = None
    """First word of a STOP file that is still there; None if there is none."""
    job_state: str | None = None
    """The scheduler's state of the job, RUNNING while it runs; None if it was not asked or does not answer."""
    is_requeued: bool = False
    """Whether the scheduler has already queued the job again."""
    is_preempted: bool = False
    """Whether the scheduler has told the job to leave its nodes."""
    is_out_of_time: bool = False
    """Whether its time limit is near."""
    crashes: int = 0
    """Crashes of this job before this end of the workers."""
    max_restarts: int = 0
    without_checkpoint: int = 0
    """How often in a row, this end included, the run left the nodes without a new checkpoint."""
    requeue_limit: int = 3
    scheduler: str = "SLURM"
    """The scheduler's name in messages."""
    starter: str = "srun"
    """The command that starts the workers."""


@dataclass(frozen=True)
class Verdict:
    """What the job does next, and how the run has ended."""

    action: Literal["end", "again", "requeue", "left"]
    """`again`: start the workers again on these nodes. `requeue`: give the nodes back and queue again. `left`: the
    scheduler queues the job by itself."""
    reason: str
    status: Status | None = None
    """How the run ended; None while it goes on."""
    code: int = 0
    is_crash: bool = False


def judge(facts: Facts) -> Verdict:
    """Decides what the job does next. A run that is done, or that a user has ended, never starts again."""
    if facts.is_done:
        return Verdict("end", "all steps are done", "FINISHED")
    if facts.is_requeued:
        return _left(facts)
    if "TERM" in facts.signals or facts.stopped_by == "signal":
        return _terminated(facts)
    word = facts.stopped_by if facts.stopped_by is not None else facts.asked_by
    if word is not None and word != REQUEUE_WORD:
        return _stopped(facts)
    if facts.is_request:
        return Verdict("end", "the request is wrong", "FAILED", exit_codes.REQUEST)
    if "WARNING" in facts.signals or word == REQUEUE_WORD:
        return _warned(facts)
    if "LOST" in facts.signals:
        return _queued_again(facts, "lost a node")
    return _crashed(facts)


def _left(facts: Facts) -> Verdict:
    return Verdict("left", f"{facts.scheduler} took the job off its nodes (a requeue, a preemption, or a lost node)")


def _stopped(facts: Facts) -> Verdict:
    """Decides after a user's request to stop, whose checkpoint may have failed."""
    # Workers that are ended because they are late fail because of each other.
    if facts.has_failed and facts.stopped_by is None and "LATE" not in facts.signals:
        return Verdict("end", "failed when it was to stop", "FAILED", exit_codes.FAILED)
    return Verdict("end", "stopped on request", "KILLED", exit_codes.INTERRUPTED)


def _terminated(facts: Facts) -> Verdict:
    """Decides after a SIGTERM, which a user or the scheduler has sent, by what the scheduler says of the job."""
    if facts.job_state is None:
        # The run is not ended, because the scheduler may have queued the job again.
        return _left(facts)
    if facts.job_state != "RUNNING":
        return Verdict("end", "cancelled, or its time limit came before the warning", "KILLED", exit_codes.INTERRUPTED)
    if facts.is_preempted:
        return _warned(facts)
    if "TERM" in facts.signals:
        return Verdict("end", "stopped by SIGTERM", "KILLED", exit_codes.TERMINATED)
    return _workers_terminated(facts)


def _workers_terminated(facts: Facts) -> Verdict:
    """Decides after a SIGTERM that only the workers got, while their job goes on.

    After a node has failed and the job was requeued, the scheduler may deliver a SIGTERM that it meant for the step
    with the same number before the requeue.
    """
    if _makes_no_progress(facts):
        reason = f"the workers got SIGTERM {facts.without_checkpoint} times without a new checkpoint"
        return Verdict("end", reason, "FAILED", exit_codes.FAILED)
    return Verdict("again", "the workers got SIGTERM, and the job goes on")


def _queued_again(facts: Facts, why: str) -> Verdict:
    if _makes_no_progress(facts):
        reason = f"{why}, {facts.without_checkpoint} times in a row without a new checkpoint (launcher.requeue_limit)"
        advice = "lower train.checkpoint_every, or raise launcher.time"
        return Verdict("end", f"{reason}: {advice}", "FAILED", exit_codes.FAILED)
    return Verdict("requeue", why)


def _makes_no_progress(facts: Facts) -> bool:
    return facts.without_checkpoint >= facts.requeue_limit


def _warned(facts: Facts) -> Verdict:
    why = "the time limit is near" if facts.is_out_of_time else "warned by a signal to the batch shell"
    why = "preempted" if facts.is_preempted else why
    if facts.stopped_by is None:
        why += "; the workers did not write a checkpoint in time"
    return _queued_again(facts, why)


def _crashed(facts: Facts) -> Verdict:
    what = "not fit to run" if "UNFIT" in facts.signals else f"crashed ({facts.starter} ended with {facts.code})"
    if facts.crashes < facts.max_restarts:
        return Verdict("again", what, is_crash=True)
    return Verdict("end", what, "FAILED", exit_codes.FAILED, is_crash=True)
