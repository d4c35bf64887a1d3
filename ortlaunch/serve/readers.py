"""Threads that read run folders: some for each run root, so that a file server that hangs holds up no other root.

Whoever waits for one may leave, or is told after some time that the root does not answer. The thread stays where it is
until the file server answers, and counts until then: there are never more of them, however often somebody asks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ortlaunch.serve.unfit import Unavailable

_OF_ROOT = 8
"""Threads of one run root."""
SECONDS = 20.0
"""The longest wait for an answer."""
_IDLE_SECONDS = 60.0
"""A thread that nobody has needed for so long ends."""
_T = TypeVar("_T")


class Readers:
    """The threads of all run roots. All methods are called in an event loop."""

    def __init__(self, most: int = _OF_ROOT) -> None:
        """
        Args:
            most: threads of one run root.
        """
        self._most = most
        self._threads: dict[Path, _Threads] = {}

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
            threads = self._threads[root] = _Threads(self._most)
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


@dataclass
class _Threads:
    """The threads of one run root. They do not keep Python from ending, as those of `ThreadPoolExecutor` would."""

    most: int
    _waiting: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)
    _count: int = 0
    _idle: int = 0
    _moved_at: float = field(default_factory=time.monotonic)
    """When a thread has last begun or ended something."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def stuck_for(self) -> float:
        """Seconds in which nothing has begun or ended while all threads are at work; 0 if one is free."""
        with self._changed:
            return 0.0 if self._idle or self._count < self.most else time.monotonic() - self._moved_at

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Has a thread do something."""
        future: Future[_T] = Future()
        with self._changed:
            self._waiting.append((future, work))
            if len(self._waiting) > self._idle and self._count < self.most:
                self._count += 1
                threading.Thread(target=self._work, name="reader", daemon=True).start()
            self._changed.notify()
        return future

    def _work(self) -> None:
        while (found := self._next()) is not None:
            future, work = found
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # It is for whoever waits.
                future.set_exception(error)
            else:
                future.set_result(result)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Waits for something to do; None if there was nothing for long, and the thread ends."""
        with self._changed:
            self._idle += 1
            self._moved_at = time.monotonic()
            self._changed.wait_for(lambda: self._waiting, _IDLE_SECONDS)
            self._idle -= 1
            self._moved_at = time.monotonic()
            if not self._waiting:
                self._count -= 1
                return None
            return self._waiting.popleft()
