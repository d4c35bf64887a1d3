"""Questions to SLURM about one job, each a single call; never one per node."""

from __future__ import annotations

import os
import re
import time

from ortlaunch.launch.queue.own import OwnState
from ortlaunch.launch.slurm.programs import shown

ALIVE = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
"""States of a job that waits or runs."""


def own_job() -> str:
    """The job that this process runs in, as SLURM's commands want it: the bare id of a sweep's last task means all."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def job_state(job_id: str) -> OwnState | None:
    """Asks the controller; None if it does not answer or does not know the job (any more)."""
    lines = shown(job_id)
    if not lines:
        return None
    # A sweep's number shows all its tasks, and is that of its last one too.
    text = next((line for line in lines if line.startswith(f"JobId={job_id} ")), lines[0])
    restarts = re.search(r"\bRestarts=(\d+)", text)
    preempted = re.search(r"\bPreemptTime=(\S+)", text)
    is_preempted = preempted is not None and preempted[1] != "None"
    return OwnState(_state(text), int(restarts[1]) if restarts else 0, is_preempted, _seconds_left(text))


def is_alive(job_id: str) -> bool:
    """Whether a job, or any task of a sweep, waits or runs; one that SLURM cannot be asked about may."""
    lines = shown(job_id)
    return not lines or any(_state(text) in ALIVE for text in lines)


def _seconds_left(text: str) -> float:
    end = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return time.mktime(time.strptime(end[1], "%Y-%m-%dT%H:%M:%S")) - time.time() if end else float("inf")


def _state(text: str) -> str:
    found = re.search(r"\bJobState=(\S+)", text)
    return found[1] if found else ""
