"""`launcher=slurm`: a run is a job of SLURM, a sweep one array."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, SlurmConfig
from ortlaunch.launch.environment import slurm_variables
from ortlaunch.launch.jobs import FRESH_SECONDS, Jobs
from ortlaunch.launch.launcher import SweepPlan
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.own import NodePlace, OwnJob, OwnState
from ortlaunch.launch.queue.submission import Ticket
from ortlaunch.launch.slurm import array, programs, query, scheduler
from ortlaunch.launch.slurm import plan as planning
from ortlaunch.launch.slurm.fitness import attempt_token
from ortlaunch.launch.slurm.refusal import in_plain_words, is_final
from ortlaunch.launch.slurm.rules import SLURM_RULES
from ortlaunch.launch.slurm.states import translated
from ortlaunch.launch.slurm.submit import submission_environment

_MOST_AT_ONCE = 500


class SlurmLauncher(BatchLauncher):
    """Submits by sbatch; in the job, ``slurm/job.sh`` does what other schedulers leave to Python."""

    name = "slurm"
    title = "SLURM"
    config = SlurmConfig
    rules = SLURM_RULES
    submit_command = "sbatch"
    starter = "srun"
    log = "slurm"

    def settle(self, config: Config) -> Config:
        """The device is what the job asks for."""
        return planning.settled(config)

    def workers_per_node(self, config: Config) -> int:
        """Workers on each node."""
        return planning.workers_per_node(config)

    def finds_same_packages(self, config: Config) -> bool:
        """Not in a container, nor by another Python, nor behind lines that change the paths."""
        cfg = _keys(config)
        return cfg.python is None and cfg.container.image is None and not cfg.setup and "PYTHONPATH" not in cfg.env

    def script(self, plan: LaunchPlan, config: Config) -> str:
        """The batch script of one run."""
        return planning.request_for(plan, config).script()

    def request(self, config: Config) -> list[tuple[str, str]]:
        """Time and partition."""
        cfg = _keys(config)
        time_limit = f"{cfg.time} minutes" if (cfg.time or "").isdecimal() else cfg.time
        return [
            ("time", time_limit or "the default (launcher.time is not set)"),
            ("partition", cfg.partition or "the default (launcher.partition is not set)"),
        ]

    def ask(self, script: str, config: Config) -> None:
        """Asks the cluster whether it would take a script."""
        answer = self._sbatch(["--test-only", "--export=ALL"], config, script)
        if answer.code == 0:
            return
        if is_final(answer.said):
            raise RequestError(in_plain_words(answer.said, config))
        # Nodes that are down at the moment are no reason not to wait for them.
        print(f"ortlaunch: warning: {in_plain_words(answer.said, config)}", file=sys.stderr)

    def enqueue(self, path: Path, config: Config) -> Ticket:
        """Puts a script into the queue."""
        answer = self._sbatch(["--parsable", "--export=ALL", str(path)], config)
        if answer.code:
            raise RequestError(in_plain_words(answer.said, config))
        line = answer.text.strip().splitlines()[-1]
        job_id, _, cluster = line.partition(";")
        if not job_id.isdigit():
            raise RequestError(f"sbatch answered with {line!r} and not with a job id")
        return Ticket(job_id, cluster or None)

    def submit_many(self, sweep: SweepPlan) -> int:
        """Puts a sweep into the queue as one array."""
        return array.submit_array(self, sweep)

    def environment(self, config: Config) -> dict[str, str]:
        """This one, without what would change the job."""
        return submission_environment(config)

    def states(self, max_age: float = FRESH_SECONDS) -> Jobs:
        """By squeue."""
        return translated(query.queue(max_age))

    def past_states(self, job_ids: Iterable[str], max_age: float = FRESH_SECONDS) -> Jobs:
        """By sacct, where the cluster has slurmdbd."""
        return translated(query.accounted(job_ids, max_age))

    def may_live(self, job_id: str) -> bool:
        """By scontrol, which knows a job of which squeue shows nothing yet."""
        return scheduler.is_alive(job_id)

    def cancel(self, job_ids: list[str]) -> None:
        """By scancel."""
        if not programs.is_here("scancel"):
            raise RequestError(f"scancel is not installed here: cancel job {job_ids[0]} from where it was submitted")
        for start in range(0, len(job_ids), _MOST_AT_ONCE):
            part = job_ids[start : start + _MOST_AT_ONCE]
            answer = programs.call("scancel", *part)
            if answer.problem:
                raise RequestError(f"scancel {part[0]}: {answer.problem}")
            if answer.code:
                raise RequestError(f"scancel {part[0]}: {' '.join(answer.said.split())}")

    def after(self, config: Config, job_ids: list[str]) -> Config:
        """By ``launcher.dependency``, beside what is given there."""
        cfg = _keys(config)
        waits = ",".join(part for part in (cfg.dependency, ":".join(["afterok", *job_ids])) if part)
        return dataclasses.replace(config, launcher=dataclasses.replace(cfg, dependency=waits))

    def own_job(self) -> OwnJob:
        """By SLURM's variables."""
        return OwnJob(
            self.name,
            os.environ["SLURM_JOB_ID"],
            os.environ["SLURM_JOB_NODELIST"],
            int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            scheduler.own_job(),
            slurm_variables(),
        )

    def own_state(self) -> OwnState | None:
        """By scontrol."""
        return scheduler.job_state(scheduler.own_job())

    def place(self, config: Config) -> NodePlace:
        """By SLURM's variables, and those that the batch script has set."""
        job = os.environ
        return NodePlace(
            rank=int(job["SLURM_NODEID"]),
            head=job["ORTLAUNCH_HEAD"],
            port=int(job["ORTLAUNCH_PORT"]),
            token=attempt_token(),
            name=job.get("SLURMD_NODENAME", ""),
        )

    def is_over(self, job_id: str) -> bool | None:
        """By scontrol."""
        known = scheduler.job_state(job_id)
        return None if known is None else known.state not in scheduler.ALIVE

    def requeue_limit(self, config: Config) -> int:
        """`launcher.requeue_limit`."""
        return _keys(config).requeue_limit

    def variables(self, config: Config) -> dict[str, str]:
        """`launcher.env`."""
        return _keys(config).env

    def _sbatch(self, words: list[str], config: Config, text: str | None = None) -> programs.Answer:
        if not programs.is_here("sbatch"):
            raise RequestError(
                "launcher=slurm: there is no sbatch on the PATH here: submit from a login node of the cluster; "
                "launcher.dry_run=true shows the script anywhere"
            )
        answer = programs.call("sbatch", *words, text=text, environment=self.environment(config))
        if answer.problem:
            raise RequestError(f"{answer.problem}: the controller is not well")
        return answer


def _keys(config: Config) -> SlurmConfig:
    assert isinstance(config.launcher, SlurmConfig)
    return config.launcher
