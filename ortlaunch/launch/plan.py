"""What a run will be: its folder and the files in it, its workers, their command and environment."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.run.run import Run

if TYPE_CHECKING:
    from ortlaunch.run.sweep import SweepTask

CPU_WORKERS = 2
"""Workers on a machine without GPU unless told otherwise: the fewest that make a run distributed."""


@dataclass(frozen=True)
class LaunchPlan:
    """One run, as this machine runs its part of it; on SLURM, as each node does."""

    run_dir: Path
    run_id: str
    name: str
    workers: int
    """Workers on each machine."""
    threads: int
    """Threads of each worker: its share of the cores."""
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set for the workers, on top of this process's own."""
    attempt: int = 0
    """How often this run was launched before."""
    nodes: int = 1
    """Machines that the run is spread over."""
    node_rank: int = 0
    """Which of them this one is; the first keeps the record."""
    sweep: SweepTask | None = None
    """Its place in a sweep."""

    @property
    def files(self) -> Run:
        """The files of the run folder."""
        return Run(self.run_dir)

    @property
    def run(self) -> str:
        """What tells this run from all others: <date>-<time>-<id>."""
        return "-".join([*self.run_dir.name.split("-")[:2], self.run_id])

    @property
    def world_size(self) -> int:
        """Workers on all machines."""
        return self.workers * self.nodes

    @property
    def torchrun_log(self) -> Path:
        """What this machine's torchrun says."""
        return self.files.torchrun_log(self.node_rank if self.nodes > 1 else None)

    @property
    def log_dir(self) -> Path:
        """Folder of the ranks' log files."""
        return self.files.logs

    @property
    def stop_file(self) -> Path:
        """The workers finish their step, write a checkpoint and end when this file is there."""
        return self.files.stop_file

    @property
    def stopped(self) -> Path:
        """The file in which the workers say that they have stopped because they were asked to."""
        return self.files.stopped_file

    @property
    def journal(self) -> Path:
        """The run's journal."""
        return self.files.journal_file

    def description(self) -> str:
        """What a dry run prints."""
        return f"# {self.workers} workers; the run folder would be\n# {self.run_dir}\n{self.shell_line()}"

    def shell_line(self) -> str:
        """The command as it would be typed in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


def folder_name(name: str) -> str:
    """A name as a part of a folder's name."""
    return re.sub(r"[^\w.+=-]+", "_", name)
