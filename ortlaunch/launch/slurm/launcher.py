"""`launcher=slurm`: submits a run as a job of SLURM, and a sweep as one array job."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import say
from ortlaunch.config.schema import AnyRun, RunConfig, SlurmConfig
from ortlaunch.launch.environment import slurm_variables
from ortlaunch.launch.jobs import FRESH_SECONDS, Jobs
from ortlaunch.launch.launcher import SweepPlan
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.queue import history
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.own import NodePlace, OwnJob, OwnState
from ortlaunch.launch.queue.submission import Ticket
from ortlaunch.launch.slurm import array, cluster, programs
from ortlaunch.launch.slurm import plan as planning
from ortlaunch.launch.slurm.fitness import attempt_token
from ortlaunch.launch.slurm.refusal import in_plain_words, is_final
from ortlaunch.launch.slurm.rules import SLURM_RULES
from ortlaunch.launch.slurm.submit import submission_environment
from ortlaunch.run.run import Run

_MOST_AT_ONCE = 500


class SlurmLauncher(BatchLauncher):
    """Submits by sbatch. In the job, ``slurm/job.sh`` takes the place of `ortlaunch.launch.queue.job`."""

    name = "slurm"
    title = "SLURM"
    config = SlurmConfig
    rules = SLURM_RULES
    submit_command = "sbatch"
    starter = "srun"
    log = "slurm"

    def settle(self, config: AnyRun) -> AnyRun:
        """Returns the configuration with the device that the job asks for."""
        return planning.settled(config)

    def workers_per_node(self, config: RunConfig) -> int:
        """Returns the number of workers on each node."""
        return planning.workers_per_node(config)

    def finds_same_packages(self, config: RunConfig) -> bool:
        """Returns false for a container, another Python, or settings that may change Python's path."""
        cfg = _keys(config)
        return cfg.python is None and cfg.container.image is None and not cfg.setup and "PYTHONPATH" not in cfg.env

    def script(self, plan: LaunchPlan) -> str:
        """Returns the batch script of one run."""
        return planning.request_for(plan).script()

    def request(self, config: RunConfig) -> list[tuple[str, str]]:
        """Returns the time limit and the partition."""
        cfg = _keys(config)
        time_limit = f"{cfg.time} minutes" if (cfg.time or "").isdecimal() else cfg.time
        return [
            ("time", time_limit or "the default (launcher.time is not set)"),
            ("partition", cfg.partition or "the default (launcher.partition is not set)"),
        ]

    def ask(self, script: str, config: RunConfig) -> None:
        """Asks the cluster whether it would take a script."""
        answer = self._sbatch(["--test-only", "--export=ALL"], config, script)
        if answer.code == 0:
            return
        if is_final(answer.said):
            raise RequestError(in_plain_words(answer.said, config))
        # The job may wait for nodes that are down now, so this is only a warning.
        say(f"ortlaunch: warning: {in_plain_words(answer.said, config)}", file=sys.stderr)

    def enqueue(self, path: Path, config: RunConfig) -> Ticket:
        """Submits a script."""
        taken = "; it may have taken the job all the same: look at squeue --me before you submit it again"
        answer = self._sbatch(["--parsable", "--export=ALL", str(path)], config, doubt=taken)
        if answer.code:
            raise RequestError(in_plain_words(answer.said, config))
        line = answer.text.strip().splitlines()[-1]
        job_id, _, cluster = line.partition(";")
        if not job_id.isdigit():
            raise RequestError(f"sbatch answered with {line!r} and not with a job id")
        return Ticket(job_id, cluster or None)

    def submit_many(self, sweep: SweepPlan) -> int:
        """Submits a sweep as one array job."""
        return array.submit_array(self, sweep)

    def environment(self, config: RunConfig) -> dict[str, str]:
        """Returns the environment of this process, without variables that would change the job."""
        return submission_environment(config)

    def states(self, max_age: float = FRESH_SECONDS) -> Jobs:
        """Returns the jobs that squeue lists."""
        return cluster.queue(max_age)

    def past_states(self, job_ids: Iterable[str], max_age: float = FRESH_SECONDS) -> Jobs:
        """Returns the jobs that sacct lists, if the cluster has slurmdbd."""
        return cluster.accounted(job_ids, max_age)

    def may_live(self, job_id: str) -> bool:
        """Asks scontrol, which knows a new job before squeue lists it."""
        return cluster.is_alive(job_id)

    def cancel(self, job_ids: list[str]) -> None:
        """Cancels jobs by scancel."""
        if not programs.is_here("scancel"):
            raise RequestError(f"scancel is not installed here: cancel job {job_ids[0]} from where it was submitted")
        for job_id in job_ids:
            programs.check_job_id(job_id)
        for start in range(0, len(job_ids), _MOST_AT_ONCE):
            part = job_ids[start : start + _MOST_AT_ONCE]
            answer = programs.call("scancel", *part)
            if answer.problem:
                raise RequestError(f"scancel {part[0]}: {answer.problem}")
            if answer.code:
                raise RequestError(f"scancel {part[0]}: {' '.join(answer.said.split())}")

    def resumed(self, config: AnyRun, run_dir: Path) -> AnyRun:
        """Returns the configuration without the jobs that the run's job before has waited for.

        SLURM soon forgets them, and refuses a job that waits for one that it does not know.
        """
        cfg, waits = _keys(config), Run(run_dir).setting("launcher.dependency")
        if not isinstance(waits, str) or cfg.dependency != waits or not _has_begun(Run(run_dir)):
            return config
        separator = "?" if "?" in waits else ","
        # What names no job (singleton) holds for every job.
        kept = separator.join(part for part in waits.split(separator) if ":" not in part)
        return dataclasses.replace(config, launcher=dataclasses.replace(cfg, dependency=kept or None))

    def after(self, config: AnyRun, job_ids: list[str]) -> AnyRun:
        """Adds the jobs to ``launcher.dependency``."""
        for job_id in job_ids:
            programs.check_job_id(job_id)
        cfg = _keys(config)
        waits = ",".join(part for part in (cfg.dependency, ":".join(["afterok", *job_ids])) if part)
        return dataclasses.replace(config, launcher=dataclasses.replace(cfg, dependency=waits))

    def own_job(self) -> OwnJob:
        """Reads the job from SLURM's variables."""
        return OwnJob(
            self.name,
            os.environ["SLURM_JOB_ID"],
            os.environ["SLURM_JOB_NODELIST"],
            int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            slurm_variables(),
            cluster.own_job(),
        )

    def own_state(self) -> OwnState | None:
        """Asks scontrol for the job's state."""
        return cluster.job_state(cluster.own_job())

    def place(self, config: RunConfig) -> NodePlace:
        """Reads the place from SLURM's variables and those of the batch script."""
        job = os.environ
        return NodePlace(
            rank=int(job["SLURM_NODEID"]),
            head=job["ORTLAUNCH_HEAD"],
            port=int(job["ORTLAUNCH_PORT"]),
            token=attempt_token(),
            name=job.get("SLURMD_NODENAME", ""),
        )

    def is_over(self, job_id: str) -> bool | None:
        """Asks scontrol whether a job is over."""
        found = cluster.job_state(job_id)
        return None if found is None else not cluster.is_alive_in(found.state)

    def requeue_limit(self, config: RunConfig) -> int:
        """Returns `launcher.requeue_limit`."""
        return _keys(config).requeue_limit

    def variables(self, config: RunConfig) -> dict[str, str]:
        """Returns `launcher.env`."""
        return _keys(config).env

    def _sbatch(
        self, words: list[str], config: RunConfig, text: str | None = None, *, doubt: str = ""
    ) -> programs.Answer:
        if not programs.is_here("sbatch"):
            raise RequestError(
                "launcher=slurm: there is no sbatch on the PATH here: submit from a login node of the cluster; "
                "launcher.dry_run=true shows the script anywhere"
            )
        answer = programs.call("sbatch", *words, text=text, environment=self.environment(config))
        if answer.problem:
            raise RequestError(f"{answer.problem}: SLURM's controller does not work properly{doubt}")
        return answer


def _has_begun(run: Run) -> bool:
    """Returns whether the run's latest job has begun an attempt, so that it waits for no other job."""
    attempts, submitted = history.load(run.path).attempts, (run.job() or {}).get("submitted")
    return bool(attempts) and isinstance(submitted, float) and attempts[-1].began > submitted


def _keys(config: RunConfig) -> SlurmConfig:
    assert isinstance(config.launcher, SlurmConfig)
    return config.launcher
