"""Routes that wait for a child or a file server wait in threads of their own, so that nothing else waits with them.

For children one person has a few of these threads at a time; what takes minutes has others than what takes a second.
For reading run folders each run root has some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from ortlaunch.serve.access import Caller
from ortlaunch.serve.index.finding import find
from ortlaunch.serve.readers import SECONDS
from ortlaunch.serve.service import Service
from ortlaunch.serve.threads import Threads

_SHORT, _LONG = 16, 8
"""Threads for all people."""
_OF_ONE = 3
"""Threads of one person, of each kind."""
_T = TypeVar("_T")


@dataclass
class _Waiting:
    """What waits for children in one event loop, by whether it may take minutes."""

    threads: dict[bool, Threads] = field(
        default_factory=lambda: {False: Threads(_SHORT, "short"), True: Threads(_LONG, "long")}
    )
    of_one: dict[tuple[int, bool], CapacityLimiter] = field(default_factory=dict)
    """By the person too. A limiter belongs to one event loop."""


_waiting: RunVar[_Waiting] = RunVar("waiting")


async def in_thread(caller: Caller, function: Callable[..., _T], *words: Any, is_long: bool = False) -> _T:
    """Calls a function that waits for a child.

    Args:
        caller: for whom it waits.
        function: the function.
        *words: what it takes.
        is_long: whether it may take minutes.
    """
    waiting = _of_loop()
    async with waiting.of_one.setdefault((caller.user_id, is_long), CapacityLimiter(_OF_ONE)):
        return await asyncio.wrap_future(waiting.threads[is_long].submit(partial(function, *words)))


async def reading_run(service: Service, caller: Caller, asked: str, function: Callable[..., _T], *words: Any) -> _T:
    """Calls a function that reads the folder of a run.

    Args:
        service: the service.
        caller: who asks.
        asked: the run's id.
        function: the function.
        *words: what it takes.

    Raises:
        HTTPException: there is no such run.
        Unavailable: the run root does not answer.
    """
    found = await to_thread.run_sync(find, service, caller, asked)
    return await service.readers.call(found.place, function, *words, seconds=SECONDS)


def _of_loop() -> _Waiting:
    try:
        return _waiting.get()
    except LookupError:
        _waiting.set(found := _Waiting())
        return found
