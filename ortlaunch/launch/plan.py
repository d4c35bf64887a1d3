"""What a run will be, and what one machine's part of it is."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.run.run import Run

if TYPE_CHECKING:
    from ortlaunch.run.sweep import SweepTask


@dataclass(frozen=True)
class LaunchPlan:
    """One run: its folder and the files in it, and its workers on all machines."""

    run_dir: Path
    run_id: str
    name: str
    workers: int
    """Workers on each machine."""
    attempt: int = 0
    """How often this run was launched before."""
    nodes: int = 1
    """Machines that the run is spread over."""
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


@dataclass(frozen=True)
class Start:
    """What starts a run, for its record: a command, and the variables that it sets for the workers."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """The command as it would be typed in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


@dataclass(frozen=True)
class NodePart:
    """What one machine does of a run: torchrun for the workers on it."""

    plan: LaunchPlan
    rank: int
    """Which of the run's machines this one is, counted from 0."""
    threads: int
    """Threads of each worker: its share of the machine's cores."""
    start: Start
    """torchrun's command, and variables on top of this process's own."""

    @property
    def torchrun_log(self) -> Path:
        """What this machine's torchrun says."""
        return self.plan.files.torchrun_log(self.rank if self.plan.nodes > 1 else None)

    def description(self) -> str:
        """What a dry run prints."""
        plan = self.plan
        return f"# {plan.workers} workers; the run folder would be\n# {plan.run_dir}\n{self.start.shell_line()}"


def new_run() -> str:
    """What tells a run from all others: <date>-<time>-<id>."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def folder_name(name: str) -> str:
    """A name as a part of a folder's name."""
    return re.sub(r"[^\w.+=-]+", "_", name)
