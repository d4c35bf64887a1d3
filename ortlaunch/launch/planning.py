"""Plans a run before anything starts: its name, its id and its folder; the launcher plans the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ortlaunch.config.schema import RunConfig
from ortlaunch.launch.plan import LaunchPlan, folder_name
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.work import work_of
from ortlaunch.run.key import RunKey


def make_plan(config: RunConfig, backend_reason: str | None = None) -> LaunchPlan:
    """Plans a new run; writes nothing.

    Args:
        config: the configuration, which has passed all checks.
        backend_reason: why the backend is not ORT, if nobody chose it.
    """
    launcher = launcher_of(config)
    key = RunKey.parsed(launcher.new_run(config))
    name = config.name or default_name(config)
    experiment = Path(config.run_root) / folder_name(config.experiment)
    run_dir = (experiment / key.folder(folder_name(name))).absolute()
    plan = launcher.plan(config, run_dir, key.run_id, name)
    return dataclasses.replace(plan, backend_reason=backend_reason)


def plan_in(config: RunConfig, run_dir: Path, run_id: str, name: str, attempt: int = 0) -> LaunchPlan:
    """Plans a run of `config` in a given folder; the arguments are those of `Launcher.plan`."""
    return launcher_of(config).plan(config, run_dir, run_id, name, attempt)


def default_name(config: RunConfig) -> str:
    """Returns the name that a run has if it is given none."""
    return work_of(config).name
