"""The job that a process runs in: its ids, its state and the place of each node."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OwnJob:
    """The job that this process runs in, from its environment."""

    scheduler: str
    """The launcher's name: tags and files of the job begin with it."""
    job_id: str
    """The id as in `Job.job_id`."""
    nodes: str
    """Names of its nodes, in the scheduler's notation."""
    restart: int = 0
    """How often the scheduler has started the job again."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that describe the job's resources, for the record; no secrets."""
    task_id: str = ""
    """The id as in job.json, for a task of an array; empty for a single job."""

    @property
    def key(self) -> str:
        """The id that names only this job in the scheduler's commands."""
        return self.task_id or self.job_id


@dataclass(frozen=True)
class OwnState:
    """The scheduler's state of the job that this process runs in."""

    state: str
    """RUNNING, or the scheduler's own word."""
    restarts: int = 0
    """How often it was queued again. The count rises as soon as the scheduler decides this."""
    is_preempted: bool = False
    """Whether the scheduler has told it to leave its nodes."""
    seconds_left: float = float("inf")
    """Seconds until its time limit."""


@dataclass(frozen=True)
class NodePlace:
    """The place of one node among the nodes of its job."""

    rank: int
    """Index of the node, from 0. The rendezvous of all workers is on the first node."""
    head: str
    """Name or address of the first node, as the others reach it."""
    port: int
    """An unused port of the first node. With a single node, 0 selects a free port."""
    token: str
    """The unique identifier of this attempt."""
    name: str = ""
    """Name by which the other nodes reach this one; empty lets torchrun choose."""
