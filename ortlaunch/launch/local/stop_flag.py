"""Requests to stop a command: Ctrl-C, SIGTERM, SIGHUP from a closed terminal, and a scheduler's warnings."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from ortlaunch.base.processes import WARNINGS

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)


class StopFlag:
    """Counts the requests to stop while its context lasts; the handler does nothing else.

    The code within looks at the flag where it can stop in order, so that a request at any moment leaves a complete
    record and the last lines on the terminal.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that asked to stop."""
        self.latest: int | None = None
        self.count = 0
        self.is_urgent = False
        """Whether a second request raises KeyboardInterrupt, for work that nobody can interrupt in order."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in _SIGNALS:
            # A signal that is ignored stays ignored: nohup keeps SIGHUP away, and a shell Ctrl-C from its background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def repeated(self) -> bool:
        """Whether there was a second request."""
        return self.count > 1

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.latest = number
        self.signal = self.signal or number
        if self.is_urgent and self.repeated:
            raise KeyboardInterrupt
