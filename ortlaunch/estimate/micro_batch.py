"""The search for the largest micro-batch that fits, with few traces: each takes seconds for a large model."""

from __future__ import annotations

from collections.abc import Callable

from ortlaunch.base.errors import RequestError

_TRIES = 6
"""Most micro-batches that are tried beside the first one."""
_NEAR_ENOUGH = 20
"""The search ends within this part of the best micro-batch."""
_PLAINLY_ABOVE = 1.02
"""What a line through two near micro-batches finds above the limit by this factor is not tried."""
_NEAR_BY = 1.5
"""Such micro-batches differ by this factor at most."""


def largest(high: Callable[[int], int], limit: int, size: int, most: int, stays: int) -> int:
    """The largest micro-batch that was tried and fits, 0 if none did.

    The memory grows nearly by a line, or by several of them, the steepest of which comes last.

    Args:
        high: the memory with a micro-batch. It raises a RequestError where a step of this size fails.
        limit: the memory that there is.
        size: the micro-batch that is tried first.
        most: the largest micro-batch to look at.
        stays: about what does not grow with the micro-batch.
    """
    known = {size: high(size)}
    least, has_hit = 1, False
    for _ in range(_TRIES):
        inside = max((one for one, found in known.items() if found <= limit), default=0)
        outside = min([most + 1, *(one for one, found in known.items() if found > limit)])
        lowest = max(inside + max(1, inside // _NEAR_ENOUGH), least)
        line, is_near = _line(known, limit, stays)
        if outside <= lowest or (is_near and inside and line(lowest) > _PLAINLY_ABOVE * limit):
            break
        # Beside one that fits by a line, the next one tells whether more do.
        at_limit = lowest if has_hit else _at_limit(line, limit, lowest, outside - 1)
        try:
            known[at_limit] = high(at_limit)
        except RequestError:
            # Batch normalization refuses one sample, so a smaller one fails too.
            least, most = (at_limit + 1, most) if at_limit < min(known) else (least, at_limit - 1)
            continue
        has_hit = not has_hit and known[at_limit] <= limit
    return max((one for one, found in known.items() if found <= limit), default=0)


def _line(known: dict[int, int], limit: int, stays: int) -> tuple[Callable[[int], float], bool]:
    """The memory by the micro-batch, by a known one on each side of the limit; whether these are near each other.

    Without one on each side, by the two that are nearest to it.
    """
    points = sorted((known if len(known) > 1 else known | {0: stays}).items())
    fitting, larger = ([one for one in points if (one[1] <= limit) is fits] for fits in (True, False))
    (near, low), (far, top) = (fitting + larger[:1])[-2:] if fitting else larger[:2]
    slope = max((top - low) / (far - near), 1.0)
    return lambda size: low + slope * (size - near), max(near, far) <= _NEAR_BY * min(near, far)


def _at_limit(line: Callable[[int], float], limit: int, lowest: int, highest: int) -> int:
    """The largest micro-batch between two that fits by a line; the lowest where none does."""
    slope = line(1) - line(0)
    return max(lowest, min(int((limit - line(0)) / slope), highest))
