"""Submits a run: asks the cluster whether it would take the job, writes the run folder, and queues it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.secrets import redacted
from ortlaunch.base.user import user_name
from ortlaunch.config.schema import Config, MlflowConfig, SlurmConfig
from ortlaunch.launch.folder import journal_start, write_run_folder
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.slurm.plan import request_for
from ortlaunch.launch.slurm.refusal import in_plain_words, is_final
from ortlaunch.launch.slurm.request import TRACKING_URI
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run

_SECONDS = 120
_ANNOUNCE_SECONDS = 90


def submit(plan: LaunchPlan, config: Config, arguments: list[str]) -> int:
    """Submits a planned run, or shows its script where ``launcher.dry_run=true``.

    Args:
        plan: the plan.
        config: the configuration, its device settled and its tracking places made absolute.
        arguments: the command line after ``ortlaunch``, for the record.

    Returns:
        0: the job is in the queue, or its script was printed.

    Raises:
        RequestError: the cluster does not take the job.
    """
    script = request_for(plan, config).script()
    if config.launcher.dry_run:
        show(script, plan, config, [("run folder", str(plan.run_dir))])
        return 0
    ask(script, config)
    write_run_folder(plan, config, arguments)
    journal = Journal(plan.journal)
    journal_start(journal, plan, config)
    journal.tags({"ortlaunch.state": "queued"})
    path = write_script(plan.run_dir, script)
    said = announce([plan.run_dir], config)
    try:
        job_id, cluster = queue(path, config)
    except RequestError:
        journal.tags({"ortlaunch.state": "failed"})
        journal.end("FAILED")
        announce([plan.run_dir], config)
        raise
    write_job(plan.run_dir, job_id, cluster)
    cfg = config.launcher
    print(f"ortlaunch: {plan.name} is in the queue as job {job_id}: {cfg.nodes} node(s), {plan.world_size} workers")
    print(f"run folder: {plan.run_dir}")
    if said and isinstance(config.tracking, MlflowConfig):
        print(f"mlflow:     {redacted(config.tracking.uri)} {said}")
    return 0


def show(script: str, plan: LaunchPlan, config: Config, places: list[tuple[str, str]]) -> None:
    """Prints a script to standard output, so that it can go into a file, and what it asks for to standard error.

    Args:
        script: the script.
        plan: what it runs; of a sweep its first run under the sweep's name.
        config: its configuration.
        places: label and place of what would be made.
    """
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    print(script, end="", flush=True)
    workers = f"{plan.workers} worker{'s' if plan.workers > 1 else ''} on {config.device.value}"
    time_limit = f"{cfg.time} minutes" if (cfg.time or "").isdecimal() else cfg.time
    lines = [
        ("job", plan.name),
        ("nodes", f"{cfg.nodes}, each with {workers}"),
        ("time", time_limit or "the default (launcher.time is not set)"),
        ("partition", cfg.partition or "the default (launcher.partition is not set)"),
        *places,
        ("to submit", "the same command without launcher.dry_run=true"),
    ]
    print("ortlaunch: a dry run: nothing was written or submitted", file=sys.stderr)
    for label, text in lines:
        print(f"{label + ':':<11} {text}", file=sys.stderr)


def ask(script: str, config: Config) -> None:
    """Asks the cluster whether it would take a script.

    Raises:
        RequestError: it would not; with its reason in plain words.
    """
    done = _sbatch(["--test-only", "--export=ALL"], config, text=script)
    if done.returncode == 0:
        return
    if is_final(done.stderr):
        raise RequestError(in_plain_words(done.stderr, config))
    # Nodes that are down at the moment are no reason not to wait for them.
    print(f"ortlaunch: warning: {in_plain_words(done.stderr, config)}", file=sys.stderr)


def queue(path: Path, config: Config) -> tuple[str, str | None]:
    """Queues a script.

    Returns:
        The job's id, and the cluster's name where SLURM has several.

    Raises:
        RequestError: the cluster does not take it.
    """
    done = _sbatch(["--parsable", "--export=ALL", str(path)], config)
    if done.returncode:
        raise RequestError(in_plain_words(done.stderr, config))
    answer = done.stdout.strip().splitlines()[-1]
    job_id, _, cluster = answer.partition(";")
    if not job_id.isdigit():
        raise RequestError(f"sbatch answered with {answer!r} and not with a job id")
    return job_id, cluster or None


def write_script(folder: Path, script: str) -> Path:
    """Leaves the script in a folder as what was submitted."""
    path = Run(folder).script_file
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return path


def write_job(
    run_dir: Path, job_id: str, cluster: str | None, array_job_id: str | None = None, array_task_id: int | None = None
) -> None:
    """Leaves in a run folder which job the run is."""
    job = {
        "scheduler": "slurm",
        "job_id": job_id,
        "array_job_id": array_job_id,
        "array_task_id": array_task_id,
        "submitted": time.time(),
        "cluster": cluster,
        "user": user_name(),
    }
    replace_text(Run(run_dir).job_file, json.dumps(job) + "\n")


def announce(folders: list[Path], config: Config) -> str:
    """Lets runs, and the sweep before them, stand in MLflow while they are queued, for a while and no longer.

    In one process of its own for all of them, which alone imports mlflow. What it does not get to, the jobs send.

    Returns:
        What there is to say about it; empty without MLflow.
    """
    if not isinstance(config.tracking, MlflowConfig):
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ortlaunch.launch.slurm.announce", *map(str, folders)],
            env=submission_environment(config),
            capture_output=True,
            text=True,
            timeout=_ANNOUNCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(answers slowly: the job will send what is missing)"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"(could not be told: {done.stderr.strip().splitlines()[-1:]})"


def _sbatch(options: list[str], config: Config, text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["sbatch", *options],
            input=text,
            env=submission_environment(config),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise RequestError(
            "launcher=slurm: there is no sbatch on the PATH here: submit from a login node of the cluster; "
            "launcher.dry_run=true shows the script anywhere"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"sbatch did not answer within {_SECONDS} s: the controller is not well") from error


def submission_environment(config: Config) -> dict[str, str]:
    """The environment that the job is given: this one, and the tracking URI where it holds a password."""
    kept = {name: value for name, value in os.environ.items() if not _would_interfere(name, config)}
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    uri = getattr(config.tracking, "uri", None)
    if uri is not None and redacted(uri) != uri:
        kept[TRACKING_URI] = uri
    return kept


_OWN_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GPUS_PER_NODE": "gpus_per_node",
    "SBATCH_GRES": "gres",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
}
"""A person's defaults for sbatch, which come before what a script says, and the keys that are to come before them."""


def _would_interfere(name: str, config: Config) -> bool:
    """Whether a variable of this shell would change what the script asks for."""
    if name.startswith(("SLURM_", "SRUN_")):
        # A shell inside another job has that job's.
        return name not in _OWN_VARIABLES
    if name in _DEFAULTS:
        return getattr(config.launcher, _DEFAULTS[name]) is not None
    return name.startswith("SBATCH_")
