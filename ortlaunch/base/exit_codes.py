"""The exit codes of every command."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
"""The training failed, or a check found something wrong."""
REQUEST = 2
"""The request is wrong: usage, configuration, missing input."""
FIRST_STOPPED = 128
"""Codes from this one on mean that a signal stopped the command."""


def stopped_by(number: int) -> int:
    """The exit code that a shell reports for a command that a signal stopped."""
    return FIRST_STOPPED + number


INTERRUPTED = stopped_by(signal.SIGINT)
TERMINATED = stopped_by(signal.SIGTERM)
