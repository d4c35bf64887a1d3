"""Routes that wait for a child or a file server wait in threads of their own, so that nothing else waits with them.

For children one person has a few of these threads at a time; what takes minutes has others than what takes a second.
For reading run folders each run root has some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from ortlaunch.serve.access import Caller
from ortlaunch.serve.index.finding import find
from ortlaunch.serve.readers import SECONDS
from ortlaunch.serve.service import Service

_SHORT, _LONG = 16, 8
"""Threads for all people."""
_OF_ONE = 3
"""Threads of one person, of each kind."""
_limiters: RunVar[dict[tuple[int | None, bool], CapacityLimiter]] = RunVar("waiting")
"""By the person and the kind; None for those of all. A limiter belongs to one event loop."""
_T = TypeVar("_T")


async def in_thread(caller: Caller, function: Callable[..., _T], *words: Any, is_long: bool = False) -> _T:
    """Calls a function that waits for a child.

    Args:
        caller: for whom it waits.
        function: the function.
        *words: what it takes.
        is_long: whether it may take minutes.
    """
    async with _limiter(caller.user_id, is_long=is_long, most=_OF_ONE):
        limiter = _limiter(None, is_long=is_long, most=_LONG if is_long else _SHORT)
        return await to_thread.run_sync(function, *words, limiter=limiter)


async def reading_run(service: Service, asked: str, function: Callable[..., _T], *words: Any) -> _T:
    """Calls a function that reads the folder of a run.

    Args:
        service: the service.
        asked: the run's id.
        function: the function.
        *words: what it takes.

    Raises:
        HTTPException: there is no such run.
        Unavailable: the run root does not answer.
    """
    found = await to_thread.run_sync(find, service, asked)
    return await service.readers.call(found.place, function, *words, seconds=SECONDS)


def _limiter(user_id: int | None, *, is_long: bool, most: int) -> CapacityLimiter:
    try:
        known = _limiters.get()
    except LookupError:
        known = {}
        _limiters.set(known)
    return known.setdefault((user_id, is_long), CapacityLimiter(most))
