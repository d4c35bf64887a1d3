"""`launcher=local`: runs on this machine, or on several that share the run folder and are started by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE
from ortlaunch.config.devices import resolve_device, usable_cores, visible_gpus
from ortlaunch.config.schema import AnyRun, LocalConfig, RunConfig
from ortlaunch.launch.launcher import Launcher
from ortlaunch.launch.local import machines
from ortlaunch.launch.local.rules import LOCAL_RULES, LOCAL_START_RULES
from ortlaunch.launch.plan import LaunchPlan, NodePart, Start, new_run
from ortlaunch.launch.torchrun import threads_per_worker, torchrun, worker_environment, workers_per_node
from ortlaunch.run.key import RunKey


class LocalLauncher(Launcher):
    """Runs the workers on this machine while the command waits."""

    name = "local"
    title = "this machine"
    config = LocalConfig
    rules = LOCAL_RULES
    start_rules = LOCAL_START_RULES

    def workers_per_node(self, config: RunConfig) -> int:
        """Returns the number of workers on this machine."""
        return workers_per_node(config, resolve_device(config.device), visible_gpus(), usable_cores())

    def new_run(self, config: RunConfig) -> str:
        """Returns ``launcher.run``, which the first of several machines has chosen; without it a new identifier."""
        return _keys(config).run or new_run()

    def submit(self, plan: LaunchPlan) -> int:
        """Runs this machine's part of the run to its end, or shows it for a dry run."""
        keys = _keys(plan.config)
        if keys.dry_run and keys.nodes > 1:
            print(machines.dry_run(plan))
            return DONE
        part = node_part(plan)
        if keys.dry_run:
            print(part.description())
            return DONE
        if plan.attempt == 0 and keys.node_rank == 0 and plan.run_dir.exists():
            run = f"launcher.run={keys.run}: {plan.run_dir} exists already"
            raise RequestError(f"{run}: continue it with ortlaunch resume")
        from ortlaunch.launch.local.run import run_part

        return run_part(part)

    def resumed(self, config: AnyRun, run_dir: Path) -> AnyRun:
        """Returns the configuration with ``launcher.run`` set, by which several machines identify the run."""
        keys = _keys(config)
        if keys.nodes == 1:
            return config
        run = str(RunKey.of_folder(run_dir.name))
        return dataclasses.replace(config, launcher=dataclasses.replace(keys, run=run))

    def keeps_record(self, config: RunConfig) -> bool:
        """Returns whether this is the run's first machine."""
        return _keys(config).node_rank == 0


def node_part(plan: LaunchPlan) -> NodePart:
    """Returns this machine's part of a run.

    Raises:
        RequestError: the first machine cannot be reached from here.
    """
    keys = _keys(plan.config)
    threads = threads_per_worker(plan.config, plan.workers, usable_cores())
    options = [*machines.rendezvous(keys, plan.run_id), f"--max-restarts={keys.max_restarts}"]
    start = Start(
        torchrun(plan, options),
        worker_environment(plan, threads, machines.network_interface(keys))
        | ({"ORTLAUNCH_ATTEMPT": str(plan.attempt)} if plan.work.counts_launches else {}),
    )
    return NodePart(plan, keys.node_rank, threads, start)


def _keys(config: RunConfig) -> LocalConfig:
    assert isinstance(config.launcher, LocalConfig)
    return config.launcher
