"""When files are looked at and streams send: in rounds, the same for all, since each sending is a system call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

FAST_SECONDS, SLOW_SECONDS = 0.2, 0.5
"""Seconds between two looks at a file that grows: for a single follower, and for `_MANY`."""
_MANY = 100
_GATHER_SECONDS = 0.02
"""Events that come so soon after each other are sent together."""


def pace(followers: int) -> float:
    """Returns the seconds between two rounds, which grow with the number of those who are sent something."""
    return FAST_SECONDS + min(1.0, followers / _MANY) * (SLOW_SECONDS - FAST_SECONDS)


def until_round(seconds: float) -> float:
    """Returns how long it is until the next round, where there is one each so many seconds."""
    return seconds - time.monotonic() % seconds


class Rounds:
    """Wakes all streams that have something to send, together and by one timer."""

    def __init__(self, streams: Callable[[], int]) -> None:
        """
        Args:
            streams: returns how many streams there are.
        """
        self._streams = streams
        self._waiting: set[asyncio.Event] = set()
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, stream: asyncio.Event, *, is_patient: bool) -> None:
        """Sets an event soon. It is called in the event loop.

        Args:
            stream: the event.
            is_patient: whether it can wait for what the next look at a file brings, to be sent with that.
        """
        self._waiting.add(stream)
        loop = asyncio.get_running_loop()
        at = loop.time() + (pace(self._streams()) if is_patient else _GATHER_SECONDS)
        if self._timer is None or at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(at, self._wake_all)

    def _wake_all(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, set(), None
        for stream in waiting:
            stream.set()
