"""Questions to SLURM about one job, each a single call; never one per node."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass

_SECONDS = 20
ALIVE = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
"""States of a job that waits or runs."""


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
    shown = _shown(job_id)
    if not shown:
        return None
    # A sweep's number shows all its tasks, and is that of its last one too.
    text = next((line for line in shown if line.startswith(f"JobId={job_id} ")), shown[0])
    restarts = re.search(r"\bRestarts=(\d+)", text)
    preempted = re.search(r"\bPreemptTime=(\S+)", text)
    is_preempted = preempted is not None and preempted[1] != "None"
    return JobState(_state(text), int(restarts[1]) if restarts else 0, is_preempted, _seconds_left(text))


def is_alive(job_id: str) -> bool:
    """Whether a job, or any task of a sweep, waits or runs; one that SLURM cannot be asked about may."""
    shown = _shown(job_id)
    return not shown or any(_state(text) in ALIVE for text in shown)


def _seconds_left(text: str) -> float:
    end = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return time.mktime(time.strptime(end[1], "%Y-%m-%dT%H:%M:%S")) - time.time() if end else float("inf")


def _state(text: str) -> str:
    found = re.search(r"\bJobState=(\S+)", text)
    return found[1] if found else ""


def _shown(job_id: str) -> list[str]:
    """What the controller shows of a job, a line for each task; empty if it does not answer or know it."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job_id],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if "JobState=" in line] if done.returncode == 0 else []
