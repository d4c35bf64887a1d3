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
    """PENDING, RUNNING, CANCELLED, …; COMPLETING while its processes end, whatever the reason."""
    restarts: int
    """How often it was queued again; counted from the moment that this is decided."""
    is_preempted: bool
    """It has notice to leave its nodes."""


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
    restarts = re.search(r"\bRestarts=(\d+)", done.stdout)
    preempted = re.search(r"\bPreemptTime=(\S+)", done.stdout)
    is_preempted = preempted is not None and preempted[1] != "None"
    return JobState(state[1], int(restarts[1]) if restarts else 0, is_preempted)


def is_alive(job_id: str) -> bool:
    """Whether a job waits or runs; one that SLURM cannot be asked about may."""
    known = job_state(job_id)
    return known is None or known.state in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
