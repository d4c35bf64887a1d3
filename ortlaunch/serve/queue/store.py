"""The queue's transactions. Each function works in the session of its caller, which commits all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ortlaunch.run.identity import machine
from ortlaunch.run.key import RunKey
from ortlaunch.serve.queue.scheduling import Capacity, Plan, Running, Waiting, amount, charged, schedule, usage_now
from ortlaunch.serve.queue.tables import OPEN_STATES, Job, JobState, QueueSetting, Request, Usage
from ortlaunch.serve.tables import Project

PAUSED = "paused"
DRAINED = "drained"
_ALL = "*"
_PAUSED = "the queue is paused by an administrator"
_KEPT_SECONDS = 30 * 24 * 3600.0
"""How long a repeated request is known."""


@dataclass(frozen=True)
class Allowance:
    """What one run may take."""

    minutes: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    """``slots`` of its owner at a time, and the bytes of ``memory`` and ``disk`` at which it is stopped."""


_ANY = Allowance()


@dataclass(frozen=True)
class Switches:
    """What administrators have set."""

    paused: bool
    drained: frozenset[str]
    """The slots that take no new run."""

    @property
    def is_drained(self) -> bool:
        """Whether no slot takes a run."""
        return _ALL in self.drained


@dataclass(frozen=True)
class Slate:
    """The slots at one moment."""

    names: Sequence[str]
    withheld: Mapping[str, str] = field(default_factory=dict)
    """Slots that no run may get now, and why; those that runs of the queue use are among them."""

    def free(self, taken: Iterable[str], drained: frozenset[str]) -> list[str]:
        """Returns the slots that a run may get."""
        used = set(taken) | set(self.withheld) | drained
        return [name for name in self.names if name not in used]


def new_run_key(session: Session) -> str:
    """Returns the key of a new run whose short id no job has."""
    while True:
        key = RunKey.new()
        if session.scalar(select(Job.number).where(Job.run_id == key.run_id).limit(1)) is None:
            return str(key)


def digest_of(request: object) -> str:
    """Returns a digest of a request, equal for equal ones."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def repeated(session: Session, user_id: int, key: str) -> tuple[Request, Job] | None:
    """Returns the request that a user has sent with this key, and its job; None if there is none."""
    query = select(Request, Job).join(Job, Job.id == Request.job_id)
    row = session.execute(query.where(Request.user_id == user_id, Request.key == key)).one_or_none()
    return None if row is None else (row[0], row[1])


def add_job(
    session: Session,
    owner: tuple[int, str],
    unix_user: str,
    run_key: str,
    request: dict[str, Any],
    checked: dict[str, Any],
    allowance: Allowance = _ANY,
) -> Job:
    """Adds a job to the queue.

    Args:
        session: the session that writes.
        owner: the number and the name of the user whose job it is.
        unix_user: whom its run belongs to.
        run_key: the key of its run.
        request: the request as it was sent.
        checked: what the check has returned. Neither it nor the request holds secrets any more.
        allowance: what it may take.
    """
    number = (session.scalar(select(func.max(Job.number))) or 0) + 1
    job = Job(
        id=f"q{number}",
        number=number,
        user_id=owner[0],
        owner=owner[1],
        unix_user=unix_user,
        state=JobState.WAITING,
        minutes=request.get("minutes") if allowance.minutes is None else allowance.minutes,
        limits=allowance.limits,
        priority=0,
        submitted=time.time(),
        taken=[],
        run_id=RunKey.parsed(run_key).run_id,
        run_key=run_key,
        request=request,
        token=secrets.token_hex(16),
        **_columns_of(checked),
    )
    session.add(job)
    session.flush()
    return job


def _columns_of(checked: dict[str, Any]) -> dict[str, Any]:
    """Returns what a check says of a run, by the columns of its job. A check may say more, which is left out."""
    same = ("slots", "needs", "name", "experiment", "launcher", "steps", "run_dir", "words")
    return {
        **{name: checked[name] for name in same},
        "resumes": "begun_before" in checked,
        "begun_before": checked.get("begun_before", 0),
    }


def remember(session: Session, user_id: int, key: str, digest: str, job: Job) -> None:
    """Notes that a request with this key has made a job, and forgets requests of long ago."""
    session.query(Request).where(Request.at < time.time() - _KEPT_SECONDS).delete()
    session.add(Request(user_id=user_id, key=key, digest=digest, job_id=job.id, at=time.time()))


def in_states(session: Session, *states: JobState) -> list[Job]:
    """Returns the jobs in some states, in the order of their submission."""
    return list(session.scalars(select(Job).where(Job.state.in_(states)).order_by(Job.number)))


def open_job_of(session: Session, place: str) -> Job | None:
    """Returns the job of a run that is not over; None if there is none.

    Args:
        session: the session.
        place: the run folder. A short id would not do: anybody can make a folder whose name ends with another run's.
    """
    query = select(Job).where(Job.run_dir == place, Job.state.in_(OPEN_STATES)).order_by(Job.number.desc())
    return session.scalars(query.limit(1)).first()


def switches(session: Session) -> Switches:
    """Returns what administrators have set."""
    found = {one.name: one.value for one in session.scalars(select(QueueSetting))}
    return Switches(found.get(PAUSED) == "yes", frozenset(json.loads(found.get(DRAINED, "[]"))))


def set_paused(session: Session, *, paused: bool) -> None:
    """Lets the queue start no run, or start them again."""
    _set(session, PAUSED, "yes" if paused else "no")


def set_drained(session: Session, slots: Iterable[str] | None) -> None:
    """Takes slots out of the queue: those named, all for None, and no other any more."""
    _set(session, DRAINED, json.dumps([_ALL] if slots is None else sorted(slots)))


def shares(session: Session, now: float) -> dict[str, float]:
    """Returns the usage of each owner in decayed slot-seconds, without the jobs that run."""
    return {one.owner: usage_now(now, one.slot_seconds, one.at) for one in session.scalars(select(Usage))}


def decide(
    session: Session, slate: Slate, capacity: Mapping[str, float], now: float, head: str | None
) -> tuple[Plan, list[Job]]:
    """Decides which jobs start, and writes the intent to start them.

    Args:
        session: the session that writes.
        slate: the slots.
        capacity: what the machine has beside them, by the names of `Job.needs`.
        now: the time.
        head: the head of the decision before.

    Returns:
        The plan for this machine's slots, and all jobs to start: those of it, and those of schedulers.
    """
    waiting, holding = in_states(session, JobState.WAITING), in_states(session, JobState.STARTING, JobState.RUNNING)
    set_by_admins = switches(session)
    taken = [name for job in holding for name in job.taken]
    free = slate.free(taken, set_by_admins.drained)
    unused = len(slate.names) - len(set(taken) & set(slate.names))
    names = tuple(capacity)

    def beside(job: Job) -> tuple[float, ...]:
        return tuple(job.needs.get(name, 0.0) for name in names)

    plan = schedule(
        now,
        Capacity(len(slate.names), unused - len(free), tuple(capacity.values()), names),
        [
            Waiting(job.id, job.account, job.number, job.slots, job.minutes, job.priority, beside(job))
            for job in _within_limits(waiting, holding, limits_of_projects(session))
        ],
        [
            Running(job.id, job.account, len(job.taken), now - seconds_run(job, now), job.minutes, beside(job))
            for job in holding
            if job.is_here
        ],
        shares(session, now),
        _why_closed(set_by_admins),
        head,
    )
    return plan, _written(plan, waiting, free, now, hands_over=not set_by_admins.paused)


def limits_of_projects(session: Session) -> dict[str, float]:
    """Returns the slots that the runs of a project may hold at a time, by the names of `Job.account`."""
    found = session.scalars(select(Project).where(Project.slots.is_not(None)))
    return {f"project {one.name}": one.slots for one in found if one.slots is not None}


def _within_limits(waiting: list[Job], holding: list[Job], of_projects: Mapping[str, float]) -> list[Job]:
    """Returns the jobs for this machine that their owners and projects may have beside the others that they have."""
    held, held_together = Counter[str](), Counter[str]()
    for job in holding:
        if job.is_here:
            held[job.owner] += charged(len(job.taken))
            held_together[job.account] += charged(len(job.taken))
    found = []
    for job in sorted(waiting, key=lambda one: (-one.priority, one.number)):
        if not job.is_here:
            continue
        most = job.limits.get("slots")
        if most is not None and held[job.owner] + charged(job.slots) > most:
            job.reason = f"its owner may hold {amount('slots', most)} at a time"
            continue
        most = of_projects.get(job.account)
        if most is not None and held_together[job.account] + charged(job.slots) > most:
            job.reason = f"its project may hold {amount('slots', most)} at a time"
            continue
        held[job.owner] += charged(job.slots)
        held_together[job.account] += charged(job.slots)
        found.append(job)
    return found


def _why_closed(set_by_admins: Switches) -> str:
    """Returns why no run starts on this machine's slots; empty if runs do."""
    if set_by_admins.paused:
        return _PAUSED
    if set_by_admins.is_drained:
        return "the machine is drained: running runs go on, and none starts"
    return ""


def _written(plan: Plan, waiting: list[Job], free: list[str], now: float, *, hands_over: bool) -> list[Job]:
    """Writes a plan into the waiting jobs.

    Args:
        plan: the plan.
        waiting: the jobs.
        free: the slots that they may get.
        now: the time.
        hands_over: whether jobs of schedulers start too.

    Returns:
        The jobs to start.
    """
    by_id = {job.id: job for job in waiting}
    for name, reason in plan.reasons.items():
        if by_id[name].reason != reason:
            by_id[name].reason = reason
    starts = [by_id[name] for name in plan.starts]
    for job in waiting:
        if not job.is_here and hands_over:
            starts.append(job)
        elif not job.is_here:
            job.reason = _PAUSED
    for job in starts:
        job.state, job.reason, job.started, job.attempts = JobState.STARTING, "", now, 1
        job.taken, free = free[: job.slots], free[job.slots :]
    return starts


def seconds_run(job: Job, now: float) -> float:
    """Returns how long a job has held its slots.

    A run on this machine tells it by the start of its process, since boot. The time of day may be set meanwhile, by
    hours where a machine had a wrong clock when it was started: no run is to be stopped or charged for these.

    Args:
        job: the job.
        now: the time of day.
    """
    if job.ticks is not None and job.machine and job.machine == machine():
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - job.ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0 if job.started is None else max(0.0, now - job.started)


def note_end(session: Session, job: Job, state: JobState, *, outcome: str = "", reason: str = "") -> None:
    """Writes that a job is over, and what it has used."""
    now = time.time()
    if job.is_here and job.started is not None:
        used = session.get(Usage, job.account) or Usage(owner=job.account, slot_seconds=0.0, at=now)
        before = usage_now(now, used.slot_seconds, used.at)
        used.slot_seconds, used.at = before + charged(len(job.taken)) * seconds_run(job, now), now
        session.add(used)
    job.state, job.ended, job.taken, job.outcome, job.reason = state, now, [], outcome, reason


def _set(session: Session, name: str, value: str) -> None:
    session.merge(QueueSetting(name=name, value=value))
