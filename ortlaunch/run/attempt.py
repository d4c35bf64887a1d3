"""The attempt at a run that this process belongs to."""

from __future__ import annotations

import os
import socket
import time


def header() -> str:
    """The line that begins an attempt's part of a log."""
    attempt = int(os.environ.get("ORTLAUNCH_ATTEMPT", "0")) + 1
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    job = os.environ.get("ORTLAUNCH_JOB") or os.environ.get("SLURM_JOB_ID", "?")
    return f"--- attempt {attempt} on {socket.gethostname()} at {when}, job {job}"
