"""What a scheduler says about jobs, in words that are no scheduler's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

FRESH_SECONDS = 5.0
"""How long an answer is good for."""


class Phase(Enum):
    """Where a job is on its way."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    """It has ended or is being ended, and its processes still leave their nodes."""
    ENDED = "ended"


class End(Enum):
    """How a scheduler ended a job."""

    CANCELLED = "cancelled"
    KILLED = "killed"
    """By its time limit, a lost node and the like."""
    FAILED = "failed"
    PREEMPTED = "preempted"


@dataclass(frozen=True)
class Job:
    """One job, or one task of an array, as its scheduler sees it."""

    job_id: str
    """As in job.json; ``120_3`` for a task of an array."""
    phase: Phase
    reason: str = ""
    """In words for people: why it waits, what holds it up, or why it ended; empty where there is nothing to say."""
    waits_again: bool = False
    """It has run before and is queued again."""
    end: End | None = None
    """How it ended, where the scheduler ended it; None while it goes on, and where its own processes ended."""
    nodes: int = 0
    node_list: str = ""
    restarts: int = 0
    """How often the scheduler has started it again."""
    elapsed: float | None = None
    """Seconds since this start."""
    left: float | None = None
    """Seconds to the time limit; None without one."""
    own_id: str = ""
    """The number that an array's task has of its own once it has started."""

    @property
    def lives(self) -> bool:
        """Whether it waits or runs."""
        return self.phase is not Phase.ENDED


@dataclass(frozen=True)
class Jobs:
    """An answer: jobs by their id."""

    jobs: dict[str, Job] = field(default_factory=dict)
    problem: str = ""
    """Why the scheduler could not be asked; empty where it was."""
    asked: float = 0.0
    """When, in seconds since the epoch."""

    def find(self, job_id: str) -> Job | None:
        """The job with this id; an array's task also by its own number."""
        if job_id in self.jobs:
            return self.jobs[job_id]
        return next((job for job in self.jobs.values() if job_id and job.own_id == job_id), None)
