"""The plan of a run, and the part of it that one machine runs."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.text import counted
from ortlaunch.config.schema import RunConfig
from ortlaunch.launch.work import Work, work_of
from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run

if TYPE_CHECKING:
    from ortlaunch.run.sweep import SweepTask


LONGEST_NAME = 200
"""The longest name of a run or an experiment in bytes. Linux's file systems take 255 with a run's time and id."""


@dataclass(frozen=True)
class LaunchPlan:
    """One run: its configuration, its folder, and its workers on all machines. All that launches a run gets this."""

    config: RunConfig
    """As `ortlaunch.compose.prepare.prepared` makes it."""
    run_dir: Path
    run_id: str
    name: str
    workers: int
    """Workers on each machine."""
    attempt: int = 0
    """How often this run was launched before."""
    arguments: tuple[str, ...] = ()
    """The command line after ``ortlaunch``, for the record."""
    sweep: SweepTask | None = None
    """Its place in a sweep; None for a single run."""
    backend_reason: str | None = None
    """Why the backend is not ORT, if nobody chose it."""

    @property
    def files(self) -> Run:
        """The files of the run folder."""
        return Run(self.run_dir)

    @property
    def work(self) -> Work:
        """What its workers do."""
        return work_of(self.config)

    @property
    def nodes(self) -> int:
        """Machines that the run is spread over."""
        return self.config.launcher.nodes

    @property
    def run(self) -> str:
        """The unique identifier of this run: <date>-<time>-<id>."""
        return str(RunKey.of_folder(self.run_dir.name))

    @property
    def world_size(self) -> int:
        """Workers on all machines."""
        return self.workers * self.nodes

    @property
    def journal(self) -> Path:
        """The run's journal."""
        return self.files.journal_file


@dataclass(frozen=True)
class Start:
    """The command that starts a run, and the variables that it sets for the workers."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """Returns the command as it would be typed in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


@dataclass(frozen=True)
class NodePart:
    """One machine's part of a run: torchrun and the workers on this machine."""

    plan: LaunchPlan
    rank: int
    """Index of this machine among the run's machines, from 0."""
    threads: int
    """CPU threads of each worker."""
    start: Start
    """torchrun's command, and the variables that it gets in addition to those of this process."""

    @property
    def torchrun_log(self) -> Path:
        """The log file of this machine's torchrun."""
        return self.plan.files.torchrun_log(self.rank if self.plan.nodes > 1 else None)

    def description(self) -> str:
        """Returns the text that a dry run prints."""
        plan = self.plan
        note = "" if plan.backend_reason is None else f"# {plan.backend_reason}\n"
        workers = counted(plan.workers, "worker")
        return f"{note}# {workers}; the run folder would be\n# {plan.run_dir}\n{self.start.shell_line()}"


def new_run() -> str:
    """Returns the unique identifier of a new run: <date>-<time>-<id>."""
    return str(RunKey.new())


def folder_name(name: str) -> str:
    """Returns a name in the form that it has in a folder's name. A sweep's long values are cut off."""
    return os.fsencode(re.sub(r"[^\w.+=-]+", "_", name))[:LONGEST_NAME].decode(errors="ignore")
