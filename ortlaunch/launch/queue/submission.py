"""What submitting a run takes whichever scheduler it goes to: its job's file, its entry in MLflow, its environment."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.user import user_name
from ortlaunch.config.load import to_dict
from ortlaunch.config.schema import Config
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers

_ANNOUNCE_SECONDS = 90


@dataclass(frozen=True)
class Ticket:
    """What a scheduler answers to a script that it takes."""

    job_id: str
    cluster: str | None = None
    """The cluster's name, where the scheduler has several."""


def write_job(
    run_dir: Path, scheduler: str, ticket: Ticket, array_job_id: str | None = None, array_task_id: int | None = None
) -> None:
    """Leaves in a run folder which job the run is.

    Args:
        run_dir: the run folder.
        scheduler: the launcher's name.
        ticket: the scheduler's answer.
        array_job_id: of a task of an array: the array's id.
        array_task_id: its number there.
    """
    job = {
        "scheduler": scheduler,
        "job_id": ticket.job_id,
        "array_job_id": array_job_id,
        "array_task_id": array_task_id,
        "submitted": time.time(),
        "cluster": ticket.cluster,
        "user": user_name(),
    }
    replace_text(Run(run_dir).job_file, json.dumps(job) + "\n")


def announce(folders: list[Path], config: Config, environment: dict[str, str]) -> str:
    """Lets runs, and the sweep before them, stand in MLflow while they are queued, for a while and no longer.

    In one process of its own for all of them, which alone imports mlflow. What it does not get to, the jobs send.

    Args:
        folders: their folders.
        config: of the first run.
        environment: that of the job, which holds the password of a tracking URI.

    Returns:
        What there is to say about it; empty if no tracker lists queued runs.
    """
    if not trackers.listing(config):
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ortlaunch.launch.queue.announce", *map(str, folders)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_ANNOUNCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(answers slowly: the job will send what is missing)"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"(could not be told: {done.stderr.strip().splitlines()[-1:]})"


def say_announced(said: str, config: Config) -> None:
    """Prints what `announce` has returned, for each tracker that lists queued runs."""
    for cfg in trackers.listing(config) if said else []:
        print(f"{cfg.name + ':':<11} {trackers.find(cfg.name).place(cfg)} {said}")


def check_alike(configs: list[Config], *, resources: bool = False) -> None:
    """Refuses a sweep whose runs cannot be one.

    Args:
        configs: those of its runs.
        resources: they are tasks of one array, which all get the same resources.

    Raises:
        RequestError: with the first key that differs.
    """
    first, *others = (to_dict(config) for config in configs)
    for other in others:
        keys = []
        if resources:
            keys += [
                f"launcher.{key}" for key in first["launcher"] if other["launcher"].get(key) != first["launcher"][key]
            ]
            keys += ["device"] if other["device"] != first["device"] else []
        keys += [key for key in ("experiment", "run_root", "tracking", "trackers") if other[key] != first[key]]
        if keys:
            what = "array, whose tasks" if resources else "sweep, whose runs"
            raise RequestError(
                f"--multirun with launcher={first['launcher']['name']} submits one {what} all get the same: {keys[0]} "
                "differs between the combinations. Submit one sweep for each value"
            )
