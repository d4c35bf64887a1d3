"""The seam of the launchers: what each of them does, so that nothing else asks which one it is.

`Launcher` is what every launcher does; `QueueLauncher` what one does whose runs wait in a scheduler's queue. An
installed package announces one of its own by an entry point of the group ``ortlaunch.launchers``
(`ortlaunch.launch.table`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ortlaunch.config.schema import Config, LauncherConfig
from ortlaunch.launch.jobs import FRESH_SECONDS, Jobs
from ortlaunch.launch.plan import LaunchPlan, new_run
from ortlaunch.run.sweep import Sweep

Rule = Callable[[Config], None]
"""Raises a RequestError for a configuration that cannot work."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    plan: LaunchPlan
    config: Config
    overrides: list[str]
    """Those that make it, for the record."""


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, before any of them is submitted."""

    name: str
    folder: Path
    """The sweep's folder, which `create` makes."""
    runs: list[PlannedRun]
    create: Callable[[], Sweep]


class Launcher(ABC):
    """Starts runs. It has no state: one object serves all runs."""

    name: ClassVar[str]
    """As in ``launcher=NAME``."""
    title: ClassVar[str]
    """What messages call it."""
    config: ClassVar[type[LauncherConfig]]
    """The dataclass of its keys; the default of its field `name` is the launcher's name."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What it refuses before anything starts."""

    def settle(self, config: Config) -> Config:
        """The configuration with what only the launcher can decide: the device, where it is left open."""
        return config

    @abstractmethod
    def workers_per_node(self, config: Config) -> int:
        """Workers on each machine."""

    def new_run(self, config: Config) -> str:
        """What will tell a new run from all others, ``<date>-<time>-<id>``."""
        return new_run()

    def plan(self, config: Config, run_dir: Path, run_id: str, name: str, attempt: int = 0) -> LaunchPlan:
        """Plans a run in a given folder; writes nothing.

        Args:
            config: the configuration, whose rules hold.
            run_dir: the run folder.
            run_id: ortlaunch's own short id of the run.
            name: what the run is called.
            attempt: how often it was launched before.
        """
        workers = self.workers_per_node(config)
        return LaunchPlan(run_dir, run_id, name, workers, attempt=attempt, nodes=config.launcher.nodes)

    @abstractmethod
    def submit(self, plan: LaunchPlan, config: Config, arguments: list[str]) -> int:
        """Runs a planned run to its end or puts it into the queue; with ``launcher.dry_run=true`` shows what it would.

        Args:
            plan: the plan.
            config: the configuration, as `ortlaunch.compose.prepare.prepared` makes it.
            arguments: the command line after ``ortlaunch``, for the record.

        Returns:
            The exit code (`ortlaunch.base.exit_codes`).

        Raises:
            RequestError: it cannot be started.
        """

    def resumed(self, config: Config, run_dir: Path) -> Config:
        """The configuration of a run that is launched again in its folder."""
        return config

    def keeps_record(self, config: Config) -> bool:
        """Whether this process keeps the run's record; one that only helps on another machine does not."""
        return True

    def finds_same_packages(self, config: Config) -> bool:
        """Whether the workers' Python finds the packages that this one finds."""
        return True


class QueueLauncher(Launcher):
    """Puts runs into the queue of a scheduler, which starts them later on machines of its own.

    A run folder's ``job.json`` says by the launcher's name who is to be asked about it. Its parts for the commands that
    follow a run are here; `ortlaunch.launch.queue.launcher.BatchLauncher` has the whole of submitting, and what a job
    does on its node.
    """

    log: ClassVar[str] = "job"
    """Name, without ``.log``, of the file in ``logs/`` that takes what the job's first process says."""

    @abstractmethod
    def submit_many(self, sweep: SweepPlan) -> int:
        """Puts all runs of a sweep into the queue; otherwise as `submit`."""

    @abstractmethod
    def states(self, max_age: float = FRESH_SECONDS) -> Jobs:
        """What the scheduler knows of all of this user's jobs, by one question.

        Args:
            max_age: oldest answer to take from a cache, in seconds; 0 asks anew.
        """

    def past_states(self, job_ids: Iterable[str], max_age: float = FRESH_SECONDS) -> Jobs:
        """What its accounting knows of jobs that `states` has forgotten; nothing where it keeps none."""
        return Jobs()

    def may_live(self, job_id: str) -> bool:
        """Whether a job, or any task of a sweep's, waits or runs; one that cannot be asked about may."""
        found = self.states(0)
        if found.problem:
            return True
        return any(job.lives for key, job in found.jobs.items() if key == job_id or key.startswith(f"{job_id}_"))

    @abstractmethod
    def cancel(self, job_ids: list[str]) -> None:
        """Takes jobs out of the queue, or ends them.

        Raises:
            RequestError: the scheduler cannot be asked, or refuses.
        """

    @abstractmethod
    def after(self, config: Config, job_ids: list[str]) -> Config:
        """The configuration of a run whose job begins only when other jobs have ended well.

        Args:
            config: the run's.
            job_ids: those that come first; not empty.
        """
