"""Threads that read run folders: some for each run root, so that a file server that hangs holds up no other root.

Whoever waits for one may leave, or is told after some time that the root does not answer. The thread stays where it is
until the file server answers, and counts until then: there are never more of them, however often somebody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ortlaunch.serve.threads import Threads
from ortlaunch.serve.unfit import Unavailable

_OF_ROOT = 8
"""Threads of one run root."""
SECONDS = 20.0
"""The longest wait for an answer."""
_T = TypeVar("_T")


class Readers:
    """The threads of all run roots. All methods are called in an event loop."""

    def __init__(self, most: int = _OF_ROOT) -> None:
        """
        Args:
            most: threads of one run root.
        """
        self._most = most
        self._threads: dict[Path, Threads] = {}

    async def call(
        self, place: Path | str, function: Callable[..., _T], *words: Any, seconds: float | None = None
    ) -> _T:
        """Calls a function that reads a run folder.

        Args:
            place: the run folder.
            function: the function.
            *words: what it takes.
            seconds: the longest wait; None waits for ever.

        Raises:
            Unavailable: there is no answer.
        """
        # As the runs of one user below the root, whose folder may be on a disk of its own.
        root = Path(place).parent.parent
        threads = self._threads.get(root)
        if threads is None:
            threads = self._threads[root] = Threads(self._most, "reader")
        if seconds is not None and threads.stuck_for() > seconds:
            raise Unavailable(_silence(root))
        waited = asyncio.wrap_future(threads.submit(partial(function, *words)))
        try:
            return await asyncio.wait_for(waited, seconds)
        except TimeoutError:
            if not waited.cancelled():
                raise
            raise Unavailable(_silence(root)) from None


def _silence(root: Path) -> str:
    return f"the run root {root} does not answer, as when a file server hangs: runs of other roots are not affected"
