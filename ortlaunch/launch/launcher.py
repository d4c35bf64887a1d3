"""The interface of the launchers. Other code uses it and does not ask which launcher a run has.

Every launcher implements `Launcher`. A launcher whose runs wait in a scheduler's queue implements `QueueLauncher`. An
installed package adds a launcher by an entry point of the group ``ortlaunch.launchers`` (`ortlaunch.launch.table`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ortlaunch.config.schema import AnyRun, LauncherConfig, RunConfig
from ortlaunch.launch.jobs import FRESH_SECONDS, Jobs
from ortlaunch.launch.plan import LaunchPlan, new_run

if TYPE_CHECKING:
    from ortlaunch.run.sweep import Sweep

Rule = Callable[[RunConfig], None]
"""A check that raises a RequestError for a configuration that cannot work."""


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, before any of them is submitted."""

    name: str
    folder: Path
    """The sweep's folder, which `create` makes."""
    runs: list[LaunchPlan]
    create: Callable[[], Sweep]


class Launcher(ABC):
    """Starts runs. It has no state: one object serves all runs."""

    name: ClassVar[str]
    """The name, as in ``launcher=NAME``."""
    title: ClassVar[str]
    """Its name in messages."""
    config: ClassVar[type[LauncherConfig]]
    """The dataclass of its keys; the default of its field `name` is the launcher's name."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Checks of the configuration that are made before anything starts."""
    start_rules: ClassVar[tuple[Rule, ...]] = ()
    """Checks of this machine, for a run that starts here."""

    def settle(self, config: AnyRun) -> AnyRun:
        """Returns the configuration with values that only the launcher can decide, such as that of ``device=auto``."""
        return config

    @abstractmethod
    def workers_per_node(self, config: RunConfig) -> int:
        """Returns the number of workers on each machine."""

    def new_run(self, config: RunConfig) -> str:
        """Returns the unique identifier of a new run, ``<date>-<time>-<id>``."""
        return new_run()

    @abstractmethod
    def submit(self, plan: LaunchPlan) -> int:
        """Runs a planned run to its end, or submits it. With ``launcher.dry_run=true`` it only shows what it would do.

        Args:
            plan: the plan.

        Returns:
            The exit code (`ortlaunch.base.exit_codes`).

        Raises:
            RequestError: it cannot be started.
        """

    def resumed(self, config: AnyRun, run_dir: Path) -> AnyRun:
        """Returns the configuration of a run that is launched again in its folder."""
        return config

    def keeps_record(self, config: RunConfig) -> bool:
        """Returns whether this process keeps the run's record. On the further machines of a run it does not."""
        return True

    def finds_same_packages(self, config: RunConfig) -> bool:
        """Returns whether the workers' Python finds the same packages as this one."""
        return True


class QueueLauncher(Launcher):
    """Submits runs to a scheduler, which starts them later on its own machines.

    A run folder's ``job.json`` holds the launcher's name, so that later commands know which scheduler to ask. This
    class declares what these commands need. `ortlaunch.launch.queue.launcher.BatchLauncher` adds the submission of a
    run, and what its job does on each node.
    """

    log: ClassVar[str] = "job"
    """Name, without ``.log``, of the file in ``logs/`` that takes the output of the job's first process."""

    @abstractmethod
    def submit_many(self, sweep: SweepPlan) -> int:
        """Submits all runs of a sweep; otherwise like `submit`."""

    @abstractmethod
    def states(self, max_age: float = FRESH_SECONDS) -> Jobs:
        """Returns the states of all jobs of this user, by one query.

        Args:
            max_age: greatest age of a cached answer, in seconds; 0 always asks the scheduler.
        """

    def past_states(self, job_ids: Iterable[str], max_age: float = FRESH_SECONDS) -> Jobs:
        """Returns the states of jobs that `states` no longer lists, from the accounting; empty without accounting."""
        return Jobs()

    def may_live(self, job_id: str) -> bool:
        """Returns whether a job, or any task of an array, may not have ended; true if the scheduler does not answer."""
        found = self.states(0)
        if found.problem:
            return True
        return any(job.lives for key, job in found.jobs.items() if key == job_id or key.startswith(f"{job_id}_"))

    @abstractmethod
    def cancel(self, job_ids: list[str]) -> None:
        """Removes jobs from the queue, or ends those that run.

        Raises:
            RequestError: the scheduler cannot be asked, or refuses.
        """

    @abstractmethod
    def after(self, config: AnyRun, job_ids: list[str]) -> AnyRun:
        """Returns the configuration of a run whose job starts only after other jobs have succeeded.

        Args:
            config: the run's configuration.
            job_ids: the jobs that must succeed first; not empty.
        """
