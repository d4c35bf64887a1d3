"""Notices that a run's folder is there no more: its workers would train for nothing."""

from __future__ import annotations

import time

from ortlaunch.run.run import Run

_LOOK_SECONDS = 1.0


class Presence:
    """Looks at a run's folder again and again while its workers train."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._looked = time.monotonic()
        self._was_gone = False

    def is_over(self) -> bool:
        """Whether the folder was gone at two looks, at least a second apart. A network file system may err once."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        was_gone, self._was_gone = self._was_gone, self._run.is_gone
        return was_gone and self._was_gone


def describe(run: Run) -> str:
    """Returns the message for the user."""
    return f"{run.path} is gone: it was deleted or moved while the run went on; its workers were ended"
