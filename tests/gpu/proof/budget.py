"""The time that a proof may take, and that of the part that runs now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """There is no time left for what was asked."""


class Budget:
    """Seconds until the end of the whole and of the current section."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._section_end = self._end

    @contextmanager
    def section(self, seconds: float) -> Iterator[None]:
        """Bounds what runs inside by `seconds`, and by the end of the whole."""
        self._section_end = min(self._end, self._clock() + seconds)
        try:
            yield
        finally:
            self._section_end = self._end

    @property
    def left(self) -> float:
        """Seconds until the current section has to end."""
        return max(0.0, self._section_end - self._clock())

    def take(self, most: float, least: float = 0.0) -> float:
        """The seconds that something may run.

        Args:
            most: its own bound.
            least: what it needs at least to be worth its start.

        Raises:
            OutOfTime: less than `least` is left.
        """
        left = self.left
        if left <= least:
            raise OutOfTime(f"the section had {left:.0f} s left, and it takes more than {least:.0f} s")
        return min(most, left)
