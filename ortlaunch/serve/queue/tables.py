"""The tables of the queue: one row for each submitted run or continuation of a run, and the repeated requests."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ortlaunch.serve.database import Base


class JobState(StrEnum):
    """The states of a job of the queue. How a run ended is in its folder, and in `Job.outcome`."""

    WAITING = "waiting"
    STARTING = "starting"
    """The intent to start it is written. From here on it may be running, also if nobody has seen it yet."""
    RUNNING = "running"
    ENDED = "ended"
    CANCELLED = "cancelled"
    """It was taken from the queue before it began."""
    REFUSED = "refused"
    """It could not begin; `Job.reason` says why."""


OPEN_STATES = (JobState.WAITING, JobState.STARTING, JobState.RUNNING)
"""The states of jobs that are not over."""


class Job(Base):
    """One job of the queue: a new run, or a run that goes on."""

    __tablename__ = "jobs"
    __table_args__ = (Index("jobs_by_state", "state", "number"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    """``q`` and the number: the id in the API."""
    number: Mapped[int] = mapped_column(Integer, unique=True)
    """Jobs are numbered in the order in which they were submitted."""
    user_id: Mapped[int] = mapped_column(Integer, index=True)
    owner: Mapped[str] = mapped_column(String(64), index=True)
    """The name of the service's user who submitted it."""
    unix_user: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16), default=JobState.WAITING)
    reason: Mapped[str] = mapped_column(Text, default="")
    """Why it waits, or why it was refused."""
    slots: Mapped[int] = mapped_column(Integer)
    """How many slots it needs, all at once; 0 for a job of a scheduler, and on the CPU of a machine with GPUs."""
    needs: Mapped[dict[str, float]] = mapped_column(JSON, default=dict, server_default="{}")
    """What it takes of this machine beside its slots: ``cores``, and ``memory`` and ``disk`` in bytes."""
    limits: Mapped[dict[str, float]] = mapped_column(JSON, default=dict, server_default="{}")
    """The ``memory`` and ``disk`` in bytes at which it is stopped."""
    minutes: Mapped[float | None] = mapped_column(Float)
    """How long it may take at most, as its owner says; None if nobody knows."""
    priority: Mapped[int] = mapped_column(Integer, default=0)
    """Jobs of a higher priority come first. Administrators set it."""
    submitted: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch, as all times here."""
    started: Mapped[float | None] = mapped_column(Float)
    ended: Mapped[float | None] = mapped_column(Float)
    taken: Mapped[list[str]] = mapped_column(JSON, default=list)
    """The names of the slots that it holds."""
    name: Mapped[str] = mapped_column(Text, default="")
    experiment: Mapped[str] = mapped_column(Text, default="")
    launcher: Mapped[str] = mapped_column(String(64), default="local")
    steps: Mapped[int | None] = mapped_column(Integer)
    run_id: Mapped[str] = mapped_column(String(16), index=True)
    """The short id of the run, known from the beginning; `resume` of a run has the run's."""
    run_key: Mapped[str] = mapped_column(String(64))
    """``<date>-<time>-<id>`` of the run, the id of the run in the API."""
    run_dir: Mapped[str] = mapped_column(Text, default="")
    """The run folder, known from the beginning. It exists when the run has begun."""
    project: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """The project that it belongs to; empty for none."""
    sweep: Mapped[str | None] = mapped_column(String(16), index=True)
    """The short id of the first run of the sweep that it belongs to; None for a single run."""
    resumes: Mapped[bool] = mapped_column(default=False)
    """Whether it goes on with a run that has begun before."""
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The request as it was sent: ``{"job": NAME or null, "keys": {…}}``."""
    words: Mapped[list[str]] = mapped_column(JSON)
    """The command line after ``ortlaunch`` that starts it."""
    pid: Mapped[int | None] = mapped_column(Integer)
    ticks: Mapped[int | None] = mapped_column(Integer)
    """When the process started, in clock ticks since boot: a later process may have the same pid."""
    machine: Mapped[str] = mapped_column(Text, default="")
    """The boot that pid and ticks belong to."""
    token: Mapped[str] = mapped_column(String(32))
    """Names the starts of this job on the machine, so that each attempt becomes one process at most."""
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    """How often its start was tried."""
    begun_before: Mapped[int] = mapped_column(Integer, default=0)
    """How often the run had begun before this job."""
    stop_asked: Mapped[float | None] = mapped_column(Float)
    """When it was asked to stop."""
    outcome: Mapped[str] = mapped_column(String(16), default="")
    """How the run ended, as its folder says: finished, stopped, failed, killed, …; empty until then."""

    @property
    def account(self) -> str:
        """Whose share of the slots it takes: its project's, or its owner's."""
        return f"project {self.project}" if self.project else self.owner

    @property
    def is_here(self) -> bool:
        """Whether it takes something of this machine; a job of a scheduler does not."""
        return bool(self.slots or self.needs)


class Request(Base):
    """A submission with an Idempotency-Key. The same key from the same user gives the same job again."""

    __tablename__ = "requests"
    __table_args__ = (UniqueConstraint("user_id", "key"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    user_id: Mapped[int] = mapped_column(Integer)
    key: Mapped[str] = mapped_column(String(200))
    digest: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the request: the same key with another request is refused."""
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[float] = mapped_column(Float, index=True)


class QueueSetting(Base):
    """What administrators set: ``paused`` starts no job, ``draining`` takes none either."""

    __tablename__ = "queue_settings"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[str] = mapped_column(Text)


class Usage(Base):
    """The slot-seconds that a user has used, decayed to a moment."""

    __tablename__ = "usage"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    slot_seconds: Mapped[float] = mapped_column(Float)
    at: Mapped[float] = mapped_column(Float)
