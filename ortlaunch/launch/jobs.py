"""The states of jobs, in terms that are the same for all schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from ortlaunch.base.user import user_name

FRESH_SECONDS = 5.0
"""How long an answer of a scheduler is reused."""

_whose: ContextVar[str | None] = ContextVar("whose", default=None)


def whose_jobs() -> str:
    """The user whose jobs a scheduler is asked about: this one, unless `of_user` names another."""
    return _whose.get() or user_name()


@contextmanager
def of_user(name: str) -> Iterator[None]:
    """Lets schedulers be asked about the jobs of another user inside the block; the service shows those of all.

    Args:
        name: the user.
    """
    token = _whose.set(name)
    try:
        yield
    finally:
        _whose.reset(token)


class Phase(Enum):
    """The phases of a job, from the queue to its end."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    """It has ended or is being ended, and some of its processes are still on their nodes."""
    ENDED = "ended"


class End(Enum):
    """How a scheduler ended a job."""

    CANCELLED = "cancelled"
    KILLED = "killed"
    """Its time limit, a lost node or a similar cause ended it."""
    FAILED = "failed"
    PREEMPTED = "preempted"


@dataclass(frozen=True)
class Job:
    """One job, or one task of an array, as its scheduler sees it."""

    job_id: str
    """The id as in job.json; ``120_3`` for a task of an array."""
    phase: Phase
    reason: str = ""
    """Text for the user: why it waits, what delays it, or why it ended; empty if there is nothing to say."""
    waits_again: bool = False
    """Whether it has run before and is queued again."""
    end: End | None = None
    """How the scheduler ended it; None while it goes on, and if its processes ended by themselves."""
    nodes: int = 0
    node_list: str = ""
    restarts: int = 0
    """How often the scheduler has started it again."""
    elapsed: float | None = None
    """Seconds since its latest start."""
    left: float | None = None
    """Seconds to the time limit; None without one."""
    own_id: str = ""
    """The separate job number that a task of an array gets when it starts."""

    @property
    def lives(self) -> bool:
        """Whether it has not ended yet."""
        return self.phase is not Phase.ENDED


class _Numbered(Protocol):
    """A job as a scheduler's answer has it."""

    @property
    def own_id(self) -> str:
        """As `Job.own_id`."""


J = TypeVar("J", bound=_Numbered)


@dataclass(frozen=True)
class Answer(Generic[J]):
    """An answer of a scheduler: jobs by their id."""

    jobs: dict[str, J] = field(default_factory=dict)
    problem: str = ""
    """Why the scheduler could not be asked; empty if it has answered."""
    asked: float = 0.0
    """Time of the query, in seconds since the epoch."""

    def find(self, job_id: str) -> J | None:
        """Returns the job with this id. A task of an array is also found by its own number."""
        if job_id in self.jobs:
            return self.jobs[job_id]
        return next((job for job in self.jobs.values() if job_id and job.own_id == job_id), None)


Jobs = Answer[Job]
"""An answer in the terms that all schedulers share."""
