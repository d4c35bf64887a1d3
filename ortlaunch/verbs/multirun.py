"""`--multirun`: runs every combination, one after the other on this machine, or all at once in a queue."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE, FAILED, FIRST_STOPPED, stopped_by
from ortlaunch.base.text import say
from ortlaunch.compose.sweeps import run_name, swept_keys, swept_name, swept_words
from ortlaunch.config.schema import LocalConfig, RunConfig
from ortlaunch.config.trainers import keys_in_names
from ortlaunch.launch.auto import chosen
from ortlaunch.launch.launcher import QueueLauncher, SweepPlan
from ortlaunch.launch.local.stop_flag import StopFlag
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.planning import default_name, make_plan
from ortlaunch.launch.table import launcher_of
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import Sweep, SweepTask, create, end, marks_of
from ortlaunch.tracking import trackers
from ortlaunch.tracking.relay import Relay

_IN_NAME = ("name", "model", "backend", "trainer", *keys_in_names())
"""Keys that a run's own name already shows."""


class Multirun:
    """Takes the combinations one by one, and closes the sweep."""

    def __init__(self, folder: Path, arguments: list[str], varied: list[str], kind: str = "sweep") -> None:
        """
        Args:
            folder: the sweep's folder.
            arguments: the command line after ``ortlaunch``, for the record.
            varied: Hydra's part of the command line, and the keys that a ready job sweeps, as KEY=VALUES.
            kind: what the sweep is called: sweep or bench.
        """
        self._folder = folder
        self._arguments = arguments
        self._varied = varied
        self._kind = kind
        self._planned: list[LaunchPlan] = []
        self._first: RunConfig | None = None
        self._sweep: Sweep | None = None
        self._name = ""
        self._failed: dict[str, str] = {}

    @property
    def has_run(self) -> bool:
        """Whether a run has begun on this machine, so that there is a sweep to end."""
        return self._sweep is not None

    @property
    def goes_on(self) -> bool:
        """Whether a failure now is one of a run, and not of the whole sweep."""
        launcher = None if self._first is None else self._first.launcher
        return self.has_run and not (isinstance(launcher, LocalConfig) and launcher.fail_fast)

    @property
    def run_dirs(self) -> list[Path]:
        """The folders of the runs so far."""
        return [one.run_dir for one in self._planned]

    def combination(self, overrides: list[str]) -> str:
        """Returns what distinguishes a combination from the others."""
        return " ".join(swept_words(self._varied, overrides))

    def note_failure(self, combination: str, why: str) -> None:
        """Keeps a combination that has failed for the summary."""
        self._failed[combination] = why

    def take(self, config: RunConfig, overrides: list[str], backend_reason: str | None = None) -> int:
        """Takes the next combination as `run` does, and notes its failure.

        Returns:
            The exit code that ends the sweep; 0 if it goes on.
        """
        code = self.run(config, overrides, backend_reason)
        if code == DONE or code >= FIRST_STOPPED or not self.goes_on:
            return code
        self.note_failure(self.combination(overrides), f"exit code {code}; see {self.run_dirs[-1]}")
        return DONE

    def run(self, config: RunConfig, overrides: list[str], backend_reason: str | None, name: str | None = None) -> int:
        """Runs the next combination here to its end, or keeps it for the queue.

        Args:
            config: its configuration.
            overrides: the overrides that make it, for the record.
            backend_reason: why its backend is not ORT, if nobody chose it.
            name: the run's name; None names it by what varies.

        Returns:
            The exit code of the run.
        """
        if self._first is None:
            self._first = config
            self._name = self._kind + swept_name(self._varied, config.name).removeprefix("sweep")
        self._check_launcher(config)
        name = name or combination_name(config, self._varied, overrides)
        plan = self._planned_run(dataclasses.replace(config, name=name), overrides, backend_reason)
        self._planned.append(plan)
        launcher = launcher_of(config)
        if isinstance(launcher, QueueLauncher):
            return DONE
        if not config.launcher.dry_run:
            self._record_runs()
        try:
            return launcher.submit(plan)
        except RequestError:
            if self.has_run:
                # It has no folder.
                self._planned.pop()
                self._record_runs()
            raise

    def objective(self, metric: str) -> float | None:
        """Returns the last value of a metric of the latest run; None if that has not finished.

        Raises:
            RequestError: the run has finished without this metric.
        """
        state = Run(self.run_dirs[-1]).state()
        if state.ended != "FINISHED":
            return None
        if metric not in state.figures:
            has = ", ".join(sorted(state.figures)) or "none"
            raise RequestError(
                f"objective={metric}: {self.run_dirs[-1].name} has not logged this metric; it has: {has}"
            )
        return state.figures[metric]

    def _check_launcher(self, config: RunConfig) -> None:
        """Refuses a combination whose launcher is not that of the combinations before it."""
        first = (self._first or config).launcher.name
        if first != config.launcher.name:
            raise RequestError(f"launcher={first},{config.launcher.name}: a sweep has one launcher: give one value")

    def _planned_run(self, config: RunConfig, overrides: list[str], backend_reason: str | None) -> LaunchPlan:
        """Plans a combination as the next run of the sweep."""
        config, why = chosen(config)
        task = SweepTask(self._folder, len(self._planned))
        return dataclasses.replace(make_plan(config, why or backend_reason, overrides), sweep=task)

    def _record_runs(self) -> None:
        """Records the runs so far in the sweep's folder, which the first of them creates."""
        if self._sweep is None:
            self._sweep = self._created()
            # Lets `ortlaunch sync` tell a sweep that goes on from one whose launcher was killed.
            Run(self._folder).note_launcher()
        self._sweep.write(self.run_dirs, complete=False)

    def close(self, code: int) -> int:
        """Submits all combinations, or ends the sweep. No further combination may come.

        Args:
            code: exit code that has ended it early.

        Returns:
            The exit code of the sweep: 1 if a run has failed.
        """
        code = code or (FAILED if self._failed else DONE)
        config = self._first
        if config is None:
            return code
        launcher = launcher_of(config)
        if isinstance(launcher, QueueLauncher):
            return launcher.submit_many(SweepPlan(self._name, self._folder, self._planned, self._created))
        if self._sweep is not None:
            self._sweep.write(self.run_dirs, complete=True)
            statuses = {"KILLED"} if code >= FIRST_STOPPED else {"FAILED"} if code else set()
            ended = end_sweep(self._folder, config, statuses)
            code = code or ended
            for combination, why in self._failed.items():
                say(f"ortlaunch: {combination} failed: {why}", file=sys.stderr)
            print(f"{self._kind}:      {self._folder}")
            for command in trackers.compare_commands(config, "--sweep", str(self._folder)):
                print(f"compare:    {command}")
        return code

    def _created(self) -> Sweep:
        assert self._first is not None
        return create_sweep(self._folder, self._name, self._first, self._arguments)


def check_returns(config: RunConfig) -> None:
    """Checks that a run returns its objective to the sweeper.

    Raises:
        RequestError: it does not run now, on this machine.
    """
    if config.launcher.dry_run:
        raise RequestError("launcher.dry_run: the sweeper chooses by what the runs return: leave out --multirun")
    if isinstance(launcher_of(config), QueueLauncher):
        name = config.launcher.name
        raise RequestError(
            f"launcher={name}: the sweeper waits for what the runs return, on this machine: launcher=local"
        )


def combination_name(config: RunConfig, varied: list[str], overrides: list[str]) -> str:
    """Returns the name of one run of a grid: the run's own name, with the varied values that it does not show.

    Args:
        config: its configuration.
        varied: the command line of the grid, and the keys that a ready job sweeps.
        overrides: the overrides that make this run.
    """
    shown = _IN_NAME if config.name is None else ("name",)
    keys = [key for key in swept_keys(varied) if key not in shown]
    return run_name(config.name or default_name(config), keys, overrides)


def create_sweep(folder: Path, name: str, config: RunConfig, arguments: list[str]) -> Sweep:
    """Makes a sweep's folder, which holds no credentials.

    Args:
        folder: the folder to make.
        name: the name of the sweep.
        config: the configuration of its first run.
        arguments: the command line after ``ortlaunch``.
    """
    public = trackers.public_settings(config)
    command = ["ortlaunch", *arguments]
    return create(folder, name, config.experiment, public["tracking"], command, public["trackers"])


def end_sweep(folder: Path, config: RunConfig, statuses: set[str]) -> int:
    """Ends a sweep according to the ends of its runs, and sends this for at most the configured time.

    Args:
        folder: the sweep's folder.
        config: the configuration of its first run.
        statuses: ends of runs that have left no mark of their end.

    Returns:
        The exit code of the signal that cut the sending short; 0 if none did.
    """
    return end_sweep_as(folder, config, marks_of(folder) | statuses)


def end_sweep_as(folder: Path, config: RunConfig, statuses: set[str]) -> int:
    """Ends a sweep with the worst of these statuses, however its runs have ended; otherwise like `end_sweep`."""
    with StopFlag() as stop:
        end(folder, statuses)
        cfgs = trackers.chosen(config)
        result = Relay(folder, *cfgs).finish(trackers.flush_seconds(cfgs), lambda: stop.signal is not None)
    if result.message:
        say(f"ortlaunch: {result.message}")
    return DONE if stop.signal is None else stopped_by(stop.signal)
