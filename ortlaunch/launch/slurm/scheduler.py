"""Questions to SLURM about one job, each a single call; never one per node."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass

_SECONDS = 20


@dataclass(frozen=True)
class JobState:
    """What SLURM knows of a job."""

    state: str
    """PENDING, RUNNING, CANCELLED, …; COMPLETING while its processes end, whatever the reason."""
    restarts: int
    """How often it was queued again; counted from the moment that this is decided."""
    is_preempted: bool
    """It has notice to leave its nodes."""
    seconds_left: float
    """Until its time limit."""


def own_job() -> str:
    """The job that this process runs in, as SLURM's commands want it: the bare id of a sweep's last task means all."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def job_state(job_id: str) -> JobState | None:
    """Asks the controller; None if it does not answer or does not know the job (any more)."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job_id],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    state = re.search(r"\bJobState=(\S+)", done.stdout)
    if done.returncode or state is None:
        return None
    restarts = re.search(r"\bRestarts=(\d+)", done.stdout)
    preempted = re.search(r"\bPreemptTime=(\S+)", done.stdout)
    is_preempted = preempted is not None and preempted[1] != "None"
    return JobState(state[1], int(restarts[1]) if restarts else 0, is_preempted, _seconds_left(done.stdout))


def _seconds_left(text: str) -> float:
    end = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return time.mktime(time.strptime(end[1], "%Y-%m-%dT%H:%M:%S")) - time.time() if end else float("inf")


def is_alive(job_id: str) -> bool:
    """Whether a job waits or runs; one that SLURM cannot be asked about may."""
    known = job_state(job_id)
    return known is None or known.state in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
