"""What a job's processes know of the job that they run in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OwnJob:
    """The job that this process runs in, from its environment."""

    scheduler: str
    """The launcher's name: tags and files of the job begin with it."""
    job_id: str
    """As `Job.job_id`."""
    nodes: str
    """Names of its nodes, in the scheduler's way of writing them."""
    restart: int = 0
    """How often the scheduler has started the job again."""
    task_id: str = ""
    """Of a task of an array: its id as job.json has it."""
    variables: dict[str, str] = field(default_factory=dict)
    """Those that say what the job was given, for the record; no secrets."""

    @property
    def key(self) -> str:
        """The id by which the scheduler's commands mean this job and no other."""
        return self.task_id or self.job_id


@dataclass(frozen=True)
class OwnState:
    """What the scheduler says of the job that this process runs in."""

    state: str
    """RUNNING, or the scheduler's own word."""
    restarts: int = 0
    """How often it was queued again; counted from the moment that this is decided."""
    is_preempted: bool = False
    """It has notice to leave its nodes."""
    seconds_left: float = float("inf")
    """Until its time limit."""


@dataclass(frozen=True)
class NodePlace:
    """Where one node stands among the nodes of its job."""

    rank: int
    """Counted from 0; the workers of all nodes meet on the first."""
    head: str
    """Name or address of the first node, as the others reach it."""
    port: int
    """A port of the first node that nothing else uses; 0 takes a free one, where there is one node."""
    token: str
    """What tells this attempt from all others."""
    name: str = ""
    """Name under which the other nodes know this one; empty leaves it to torchrun."""
