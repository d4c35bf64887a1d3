"""The line that begins an attempt's part of a log: ``--- attempt NUMBER on HOST at TIME[, job ID]``."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import NamedTuple

_MARK = "--- attempt "


def header() -> str:
    """The line for the attempt that this process belongs to."""
    attempt = int(os.environ.get("ORTLAUNCH_ATTEMPT", "0")) + 1
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    job = os.environ.get("ORTLAUNCH_JOB") or os.environ.get("SLURM_JOB_ID")
    return f"{_MARK}{attempt} on {socket.gethostname()} at {when}{f', job {job}' if job else ''}"


class AttemptLog(NamedTuple):
    """An attempt's part of a log."""

    text: str
    host: str | None
    """The machine in its header; None where the log has no header."""


def last_attempt(log: str) -> AttemptLog:
    """The last attempt's part of a log. A log without a header has a single part."""
    text = log.rpartition(_MARK)[2]
    host = re.match(r"\d+ on (\S+) at ", text)
    return AttemptLog(text, host[1] if host else None)
