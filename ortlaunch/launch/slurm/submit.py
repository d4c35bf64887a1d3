"""Submits a run: asks the cluster whether it would take the job, writes the run folder, and queues it."""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from ortlaunch.config.schema import Config, MlflowConfig, SlurmConfig
from ortlaunch.errors import RequestError
from ortlaunch.launch.local import journal_start, write_run_folder
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.slurm.plan import request_for
from ortlaunch.launch.slurm.refusal import in_plain_words, is_final
from ortlaunch.tracking.journal import Journal
from ortlaunch.tracking.uri import redacted

SCRIPT, JOB = "sbatch.sh", "job.json"
_SECONDS = 120
_ANNOUNCE_SECONDS = 60


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
        print(script, end="")
        return 0
    ask(script, config)
    write_run_folder(plan, config, arguments)
    journal = Journal(plan.journal)
    journal_start(journal, plan, config)
    journal.tags({"ortlaunch.state": "queued"})
    path = write_script(plan.run_dir, script)
    said = announce(plan.run_dir, config)
    try:
        job_id, cluster = queue(path, config)
    except RequestError:
        journal.tags({"ortlaunch.state": "failed"})
        journal.end("FAILED")
        announce(plan.run_dir, config)
        raise
    write_job(plan.run_dir, job_id, cluster)
    cfg = config.launcher
    print(f"ortlaunch: {plan.name} is in the queue as job {job_id}: {cfg.nodes} node(s), {plan.workers} workers")
    print(f"run folder: {plan.run_dir}")
    if said and isinstance(config.tracking, MlflowConfig):
        print(f"mlflow:     {redacted(config.tracking.uri)} {said}")
    return 0


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
    path = folder / SCRIPT
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
        "user": _user(),
    }
    partial = run_dir / f".{JOB}"
    partial.write_text(json.dumps(job) + "\n")
    os.replace(partial, run_dir / JOB)


def announce(run_dir: Path, config: Config) -> str:
    """Lets the run stand in MLflow while it is queued; waits for a slow server for a while and no longer.

    In a process of its own, which alone imports mlflow.

    Returns:
        What there is to say about it; empty without MLflow.
    """
    if not isinstance(config.tracking, MlflowConfig):
        return ""
    command = [sys.executable, "-m", "ortlaunch.launch.slurm.job", "announce", str(run_dir)]
    try:
        done = subprocess.run(
            command,
            env=submission_environment(config),
            capture_output=True,
            text=True,
            timeout=_ANNOUNCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(does not answer: the job will send what it has)"
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
    # What a shell inside another job has would be taken for options of this one.
    kept = {name: value for name, value in os.environ.items() if not re.match(r"(SLURM|SBATCH|SRUN)_(?!CONF)", name)}
    kept |= {name: os.environ[name] for name in ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT") if name in os.environ}
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    uri = getattr(config.tracking, "uri", None)
    if uri is not None and redacted(uri) != uri:
        kept["ORTLAUNCH_TRACKING_URI"] = uri
    return kept


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
