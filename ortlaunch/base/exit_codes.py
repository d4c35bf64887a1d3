"""The exit codes of every command."""

from __future__ import annotations

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


# POSIX fixes these numbers. The module `signal` takes 2 ms to import.
INTERRUPTED = stopped_by(2)
TERMINATED = stopped_by(15)
BROKEN_PIPE = stopped_by(13)
