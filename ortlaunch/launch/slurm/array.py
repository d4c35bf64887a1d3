"""Submits all runs of a sweep as the tasks of one array job.

Like a single run, each of them gets its folder, its run id and its entry in MLflow at submission. The array's script
is that of a single run. Each task reads the path of its run folder from the sweep's ``tasks/N``.
"""

from __future__ import annotations

import dataclasses

from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE
from ortlaunch.config.schema import RunConfig, SlurmConfig
from ortlaunch.launch.launcher import SweepPlan
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.submission import Ticket, announce, check_alike, write_job
from ortlaunch.launch.slurm.plan import request_for


def submit_array(launcher: BatchLauncher, sweep: SweepPlan) -> int:
    """Submits planned runs as one array, or shows its script where ``launcher.dry_run=true``.

    Args:
        launcher: the launcher for SLURM.
        sweep: the planned runs, which must have the same keys of the launcher.

    Returns:
        0: the array is in the queue, or its script was printed.

    Raises:
        RequestError: the runs ask for different resources, or the cluster does not take the array.
    """
    check_alike([one.config for one in sweep.runs], resources=True)
    config = sweep.runs[0].config
    named = dataclasses.replace(sweep.runs[0], name=sweep.name)
    script = request_for(named, tasks=len(sweep.runs), folder=sweep.folder).script()
    if config.launcher.dry_run:
        places = [("runs", f"{len(sweep.runs)}{_at_once(config)}"), ("sweep", str(sweep.folder))]
        launcher.show(script + _tasks_text(sweep), named, places)
    else:
        _submit(launcher, sweep, config, script)
    return DONE


def _tasks_text(sweep: SweepPlan) -> str:
    """Returns a comment for each task that says which run it is."""
    return "".join(
        f"# {sweep.folder / 'tasks'}/{number}: {one.run_dir}  {' '.join(one.arguments)}\n"
        for number, one in enumerate(sweep.runs)
    )


def _submit(launcher: BatchLauncher, sweep: SweepPlan, config: RunConfig, script: str) -> None:
    """Writes the folders of the sweep and of its runs, and submits the array."""
    launcher.ask(script, config)
    made = sweep.create()
    for one in sweep.runs:
        launcher.prepare(one)
    runs = [one.run_dir for one in sweep.runs]
    made.write(runs, complete=True)
    path = launcher.write_script(sweep.folder, script)
    said = announce([sweep.folder, *runs], config, launcher.environment(config))
    try:
        ticket = launcher.enqueue(path, config)
    except RequestError:
        launcher.give_up(sweep.runs)
        raise
    write_job(sweep.folder, launcher.name, ticket)
    for number, run_dir in enumerate(runs):
        task = Ticket(f"{ticket.job_id}_{number}", ticket.cluster)
        write_job(run_dir, launcher.name, task, ticket.job_id, number)
    launcher.say_sweep(
        sweep, f"{made.name} is in the queue as job {ticket.job_id}", ticket.job_id, said, _at_once(config)
    )


def _at_once(config: RunConfig) -> str:
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    return f", {cfg.array_limit} at once" if cfg.array_limit else ""
