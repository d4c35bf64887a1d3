"""The steps of a submission that all schedulers share: job.json, the entry in MLflow, and the check of a sweep."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.programs import module_command
from ortlaunch.base.text import say
from ortlaunch.base.user import user_name
from ortlaunch.config.load import to_dict
from ortlaunch.config.schema import RunConfig
from ortlaunch.run import claim
from ortlaunch.run.run import Run, job_key
from ortlaunch.tracking import trackers

_ANNOUNCE_SECONDS = 90


@dataclass(frozen=True)
class Ticket:
    """The scheduler's answer to a script that it has accepted."""

    job_id: str
    cluster: str | None = None
    """The cluster's name, if the scheduler has several."""


def write_job(
    run_dir: Path, scheduler: str, ticket: Ticket, array_job_id: str | None = None, array_task_id: int | None = None
) -> None:
    """Writes to a run folder which job the run is, and hands this process's claim of the run over to the job.

    Args:
        run_dir: the run folder.
        scheduler: the launcher's name.
        ticket: the scheduler's answer.
        array_job_id: for a task of an array, the id of the array.
        array_task_id: for a task of an array, its number in the array.
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
    claim.hand_over(Run(run_dir), job_key(job) or ticket.job_id)


def announce(folders: list[Path], config: RunConfig, environment: dict[str, str]) -> str:
    """Sends queued runs, and their sweep before them, to the trackers that list runs, for at most `_ANNOUNCE_SECONDS`.

    A separate process does this for all of them, so that this one does not import mlflow. The jobs send the rest.

    Args:
        folders: folders of the sweep and the runs.
        config: the configuration of the first run.
        environment: the environment of the job, which holds the password of a tracking URI.

    Returns:
        A text about the result for the user; empty if no tracker lists queued runs.
    """
    if not trackers.listing(config):
        return ""
    try:
        done = subprocess.run(
            [*module_command("ortlaunch.launch.queue.announce"), *map(str, folders)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_ANNOUNCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(answers slowly: the job will send what is missing)"
    lines = done.stdout.strip().splitlines()
    if lines:
        return lines[-1]
    said = done.stderr.strip().splitlines()
    return f"(not sent yet: {said[-1] if said else f'ended with {done.returncode}'})"


def say_announced(said: str, config: RunConfig) -> None:
    """Prints what `announce` has returned, for each tracker that lists queued runs."""
    for cfg in trackers.listing(config) if said else []:
        say(f"{cfg.name + ':':<11} {trackers.find(cfg.name).place(cfg)} {said}")


def check_alike(configs: list[RunConfig], *, resources: bool = False) -> None:
    """Refuses a sweep whose runs differ in a key that must be the same.

    Args:
        configs: the configurations of its runs.
        resources: whether the runs are tasks of one array, which all get the same resources.

    Raises:
        RequestError: a key differs; the message names the first one.
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
