"""The exit codes of every command."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
"""The training failed, or what was looked at is not as it should be."""
REQUEST = 2
"""The request is wrong: usage, configuration, missing input."""
FIRST_STOPPED = 128
"""Codes from here on mean that somebody asked to stop."""


def stopped_by(number: int) -> int:
    """The code of a command that a signal has stopped, as shells give it."""
    return FIRST_STOPPED + number


INTERRUPTED = stopped_by(signal.SIGINT)
TERMINATED = stopped_by(signal.SIGTERM)
