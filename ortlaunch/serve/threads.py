"""Threads that do not keep Python from ending, as those of `ThreadPoolExecutor` and of anyio would.

What they wait for, a child or a file server, may give no answer for minutes, and Ctrl-C is to end the service at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

_IDLE_SECONDS = 60.0
"""A thread that nobody has needed for so long ends."""
_T = TypeVar("_T")


@dataclass
class Threads:
    """Some threads that do one thing after the other, in the order in which it was submitted."""

    most: int
    """How many things are done at once."""
    name: str
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
        """Has a thread do something.

        Args:
            work: what to do. Its result, or its error, is that of the returned future.
        """
        future: Future[_T] = Future()
        with self._changed:
            self._waiting.append((future, work))
            if len(self._waiting) > self._idle and self._count < self.most:
                self._count += 1
                threading.Thread(target=self._work, name=self.name, daemon=True).start()
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
