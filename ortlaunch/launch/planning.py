"""Plans a run before anything starts: its name, its id and its folder; the launcher plans the rest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.config.load import load_run_config
from ortlaunch.config.schema import RunConfig
from ortlaunch.launch.plan import LaunchPlan, folder_name
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.work import work_of
from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run


def make_plan(
    config: RunConfig, backend_reason: str | None = None, arguments: Sequence[str] = (), key: RunKey | None = None
) -> LaunchPlan:
    """Plans a new run; writes nothing.

    Args:
        config: the configuration, which has passed all checks.
        backend_reason: why the backend is not ORT, if nobody chose it.
        arguments: the command line after ``ortlaunch``, for the record.
        key: the run's key; None for a new one.
    """
    key = key or RunKey.parsed(launcher_of(config).new_run(config))
    name = config.name or default_name(config)
    experiment = Path(config.run_root) / folder_name(config.experiment)
    run_dir = (experiment / key.folder(folder_name(name))).absolute()
    plan = plan_in(config, run_dir, key.run_id, name)
    return dataclasses.replace(plan, backend_reason=backend_reason, arguments=tuple(arguments))


def plan_in(config: RunConfig, run_dir: Path, run_id: str, name: str, attempt: int = 0) -> LaunchPlan:
    """Plans a run in a given folder; writes nothing.

    Args:
        config: the configuration, which has passed all checks.
        run_dir: the run folder.
        run_id: ortlaunch's own short id of the run.
        name: the run's name.
        attempt: how often it was launched before.
    """
    return LaunchPlan(config, run_dir, run_id, name, launcher_of(config).workers_per_node(config), attempt=attempt)


def stored(run_dir: Path) -> LaunchPlan:
    """Returns the plan of a run in its job, from its folder. The job's first process gives the others the attempt.

    Raises:
        RequestError: the folder holds no configuration that can be read.
    """
    config = load_run_config(Run(run_dir).config_file)
    name, attempt = config.name or default_name(config), int(os.environ.get("ORTLAUNCH_ATTEMPT", "0"))
    return plan_in(config, run_dir, RunKey.of_folder(run_dir.name).run_id, name, attempt)


def default_name(config: RunConfig) -> str:
    """Returns the name that a run has if it is given none."""
    return work_of(config).name
