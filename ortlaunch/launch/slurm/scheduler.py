"""Asks SLURM about one job. Each question is a single call for all nodes."""

from __future__ import annotations

import os
import re
import time

from ortlaunch.launch.queue.own import OwnState
from ortlaunch.launch.slurm.programs import shown

ALIVE = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
"""States of a job that waits or runs."""


def own_job() -> str:
    """Returns the id of the job that this process runs in, as SLURM's commands take it.

    A task of an array is named ARRAY_TASK, because the job id of the last task is also that of the whole array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def job_state(job_id: str) -> OwnState | None:
    """Asks the controller for a job's state; returns None if it does not answer or does not know the job."""
    lines = shown(job_id)
    if not lines:
        return None
    # The id of an array shows all its tasks, and it is also the job id of the last one.
    text = next((line for line in lines if line.startswith(f"JobId={job_id} ")), lines[0])
    restarts = re.search(r"\bRestarts=(\d+)", text)
    preempted = re.search(r"\bPreemptTime=(\S+)", text)
    is_preempted = preempted is not None and preempted[1] != "None"
    return OwnState(_state(text), int(restarts[1]) if restarts else 0, is_preempted, _seconds_left(text))


def is_alive(job_id: str) -> bool:
    """Returns whether a job, or any task of an array, waits or runs; true if SLURM does not answer."""
    lines = shown(job_id)
    return not lines or any(_state(text) in ALIVE for text in lines)


def _seconds_left(text: str) -> float:
    end = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return time.mktime(time.strptime(end[1], "%Y-%m-%dT%H:%M:%S")) - time.time() if end else float("inf")


def _state(text: str) -> str:
    found = re.search(r"\bJobState=(\S+)", text)
    return found[1] if found else ""
