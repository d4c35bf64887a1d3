"""Submits a sweep: all its runs as the tasks of one array job.

Every run gets its folder, its run id and its place in MLflow at submission, as a single one does. The array's script
is that of a single run; each task finds its run folder in the sweep's ``tasks/N``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, SlurmConfig
from ortlaunch.launch.folder import journal_start, write_run_folder
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.slurm.plan import request_for
from ortlaunch.launch.slurm.submit import announce, ask, queue, say_announced, show, write_job, write_script
from ortlaunch.run.journal import Journal
from ortlaunch.run.sweep import Sweep, end
from ortlaunch.tracking import trackers

Planned = list[tuple[LaunchPlan, Config, list[str]]]


def submit_array(name: str, create: Callable[[], Sweep], folder: Path, planned: Planned) -> int:
    """Submits planned runs as one array, or shows its script where ``launcher.dry_run=true``.

    Args:
        name: what the sweep is called.
        create: makes the sweep's folder.
        folder: that folder.
        planned: plan, configuration and overrides of each run; their launchers are the same.

    Returns:
        0: the array is in the queue, or its script was printed.

    Raises:
        RequestError: the cluster does not take it.
    """
    plan, config, _ = planned[0]
    named = dataclasses.replace(plan, name=name)
    script = request_for(named, config, tasks=len(planned), folder=folder).script()
    if config.launcher.dry_run:
        tasks = [
            f"# {folder / 'tasks'}/{one.sweep.number if one.sweep else 0}: {one.run_dir}  {' '.join(overrides)}\n"
            for one, _, overrides in planned
        ]
        places = [("runs", f"{len(planned)}{_at_once(config)}"), ("sweep", str(folder))]
        show("".join([script, *tasks]), named, config, places)
        return 0
    ask(script, config)
    sweep = create()
    for one, its_config, overrides in planned:
        write_run_folder(one, its_config, overrides)
        journal = Journal(one.journal)
        journal_start(journal, one, its_config)
        journal.tags({"ortlaunch.state": "queued"})
        journal.close()
    runs = [one.run_dir for one, _, _ in planned]
    sweep.write(runs, complete=True)
    path = write_script(folder, script)
    said = announce([folder, *runs], config)
    try:
        job_id, cluster = queue(path, config)
    except RequestError:
        for run_dir in [*runs, folder]:
            end(run_dir, {"FAILED"})
        announce([folder, *runs], config)
        raise
    write_job(folder, job_id, cluster)
    for number, run_dir in enumerate(runs):
        write_job(run_dir, f"{job_id}_{number}", cluster, job_id, number)
    _say(sweep, job_id, len(runs), config, said)
    return 0


def _at_once(config: Config) -> str:
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    return f", {cfg.array_limit} at once" if cfg.array_limit else ""


def _say(sweep: Sweep, job_id: str, runs: int, config: Config, said: str) -> None:
    of_nodes = f"{runs} runs of {config.launcher.nodes} node(s){_at_once(config)}"
    print(f"ortlaunch: {sweep.name} is in the queue as job {job_id}: {of_nodes}")
    print(f"sweep:      {sweep.folder}")
    print(f"runs:       ortlaunch jobs --sweep {job_id}")
    for command in trackers.compare_commands(config, "--sweep", str(sweep.folder)):
        print(f"compare:    {command}")
    say_announced(said, config)
