"""Questions to SLURM about one job, each a single call; never one per node."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_SECONDS = 20


@dataclass(frozen=True)
class JobState:
    """What SLURM knows of a job."""

    state: str
    """PENDING, RUNNING, CANCELLED, …; REQUEUED while it is on its way back into the queue."""
    is_preempted: bool


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
    # A sweep's id shows all its tasks, the one that was asked for among them.
    state = re.search(r"\bJobState=(\S+)", done.stdout)
    if done.returncode or state is None:
        return None
    preempted = re.search(r"\bPreemptTime=(\S+)", done.stdout)
    return JobState(state[1], preempted is not None and preempted[1] != "None")


def is_alive(job_id: str) -> bool:
    """Whether a job waits or runs; one that SLURM cannot be asked about may."""
    known = job_state(job_id)
    return known is None or known.state in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
