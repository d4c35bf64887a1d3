"""Waits for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds that no healthy machine needs, however busy it is, and fewer than pytest gives a test."""


def until(holds: Callable[[], T], seconds: float = PATIENCE, said: Callable[[], object] = lambda: "") -> T:
    """Asks until the answer is true, and returns it.

    Args:
        holds: is asked again and again.
        seconds: the longest wait.
        said: makes the text that a failure shows.
    """
    deadline = time.monotonic() + seconds
    while not (answer := holds()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)
    return answer
