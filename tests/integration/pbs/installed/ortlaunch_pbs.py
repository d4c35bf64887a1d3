"""A launcher as another package brings it: `launcher=pbs`, for a scheduler with PBS's programs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, Device, LauncherConfig
from ortlaunch.launch.jobs import FRESH_SECONDS, End, Job, Jobs, Phase
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.own import OwnJob, OwnState
from ortlaunch.launch.queue.submission import Ticket
from ortlaunch.launch.torchrun import CPU_WORKERS, workers_per_node

_PHASES = {"Q": Phase.WAITING, "H": Phase.WAITING, "R": Phase.RUNNING, "E": Phase.LEAVING, "F": Phase.ENDED}
_REASONS = {"Q": "waits for its turn", "H": "waits for another job"}


@dataclass
class PbsConfig(LauncherConfig):
    """A job of a PBS scheduler."""

    name: str = "pbs"
    queue: str | None = None
    """As qsub's -q."""
    walltime: str | None = None
    """Time limit, HOURS:MINUTES:SECONDS."""
    depend: str | None = None
    """What to wait for, as qsub's -W depend."""


def _walltime(config: Config) -> None:
    walltime = _keys(config).walltime
    if walltime is not None and not re.fullmatch(r"\d+:\d\d:\d\d", walltime):
        raise RequestError(f"launcher.walltime={walltime}: must be HOURS:MINUTES:SECONDS")


class PbsLauncher(BatchLauncher):
    """Submits by qsub."""

    name = "pbs"
    title = "PBS"
    config = PbsConfig
    rules = (_walltime,)
    submit_command = "qsub"

    def settle(self, config: Config) -> Config:
        return dataclasses.replace(config, device=Device.cpu) if config.device is Device.auto else config

    def workers_per_node(self, config: Config) -> int:
        return workers_per_node(config, config.device, gpus=1, cores=CPU_WORKERS)

    def script(self, plan: LaunchPlan) -> str:
        keys = _keys(plan.config)
        options = {"-N": plan.name, "-q": keys.queue, "-W": keys.depend and f"depend={keys.depend}"}
        options["-l"] = keys.walltime and f"walltime={keys.walltime}"
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#PBS {option} {value}" for option, value in options.items() if value is not None),
                f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
                f"exec {shlex.quote(sys.executable)} -m ortlaunch.launch.queue.job {shlex.quote(str(plan.run_dir))}\n",
            ]
        )

    def enqueue(self, path: Path, config: Config) -> Ticket:
        return Ticket(_call("qsub", "-V", str(path), environment=self.environment(config)).strip())

    def request(self, config: Config) -> list[tuple[str, str]]:
        return [("time", _keys(config).walltime or "the default (launcher.walltime is not set)")]

    def states(self, max_age: float = FRESH_SECONDS) -> Jobs:
        try:
            shown = json.loads(_call("qstat", "-x", "-f", "-F", "json"))
        except RequestError as error:
            return Jobs(problem=str(error))
        return Jobs({job_id: _job(job_id, values) for job_id, values in shown["Jobs"].items()}, asked=time.time())

    def cancel(self, job_ids: list[str]) -> None:
        _call("qdel", *job_ids)

    def after(self, config: Config, job_ids: list[str]) -> Config:
        keys = dataclasses.replace(_keys(config), depend=":".join(["afterok", *job_ids]))
        return dataclasses.replace(config, launcher=keys)

    def own_job(self) -> OwnJob:
        nodes = Path(os.environ["PBS_NODEFILE"]).read_text().split()
        variables = {name: value for name, value in os.environ.items() if name.startswith("PBS_JOB")}
        restart = int(os.environ["PBS_RUN_COUNT"]) - 1
        return OwnJob(self.name, os.environ["PBS_JOBID"], ",".join(nodes), restart, variables)

    def own_state(self) -> OwnState | None:
        job = self.states(0).find(os.environ["PBS_JOBID"])
        if job is None:
            return None
        state = "CANCELLED" if job.end is End.CANCELLED else "RUNNING"
        return OwnState(state, job.restarts, seconds_left=job.left if job.left is not None else float("inf"))

    def requeue(self, job: OwnJob) -> bool:
        try:
            _call("qrerun", job.job_id)
        except RequestError:
            return False
        return True


def _job(job_id: str, values: dict[str, Any]) -> Job:
    state = values["job_state"]
    return Job(
        job_id,
        _PHASES[state],
        _REASONS.get(state, ""),
        waits_again=state == "Q" and values["run_count"] > 0,
        end=End.CANCELLED if values["deleted"] else None,
        nodes=1,
        node_list=values["exec_host"],
        restarts=max(0, values["run_count"] - 1),
        elapsed=time.time() - values["stime"] if values["stime"] else None,
    )


def _call(program: str, *words: str, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            [program, *words], env=environment, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{program} cannot be asked: {error}") from error
    if done.returncode:
        raise RequestError(f"{program}: {done.stderr.strip()}")
    return done.stdout


def _keys(config: Config) -> PbsConfig:
    assert isinstance(config.launcher, PbsConfig)
    return config.launcher
