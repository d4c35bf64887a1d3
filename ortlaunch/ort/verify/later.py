"""Values as they will be many steps later, round ones among them, and whether a forward gives other results with them.

A counter often has no effect on the first batches (`if self.steps > 1000`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ortlaunch.ort.verify.kept import Kept

LATER = 1000
"""Steps after which values are tried."""
_ROUND = 15_120_000
"""Divisible by powers of ten, by 128 and by all numbers up to 10, for uses in every so many steps; exact in fp32."""
_ROUND_LENGTH = 1000
TIMES: tuple[int | None, ...] = (None, -2, -1, 0)
"""When values are tried: after `LATER` steps, and that many steps after counters are round."""


def is_later_different(before: Kept, after: Kept, when: int | None, differs: Callable[[], bool]) -> bool:
    """Whether a forward gives other results, or fails, when the values have changed on.

    Args:
        before: the values before a forward.
        after: those after it, which it finds now.
        when: one of `TIMES`.
        differs: runs the model; whether its results are others than with the values of now.
    """
    later = {path: _later(before.copies.get(path), after.copies[path], when) for path in after.places}
    moved = {path: value for path, value in later.items() if value is not None}
    if not moved:
        return False
    for path, value in moved.items():
        after.places[path].put(value)
    try:
        return differs()
    except Exception:
        return True
    finally:
        after.restore()


def _later(before: Any, after: Any, when: int | None) -> Any:
    """Returns the value that is reached with as much change in each further step; None where there is none."""
    if type(before) is not type(after) or getattr(before, "shape", None) != getattr(after, "shape", None):
        return None
    try:
        if isinstance(after, str | bytes):
            return _later_text(before, after, when)
        change = after - before
        moves = bool((change != 0).any()) if hasattr(change, "any") else change != 0
        if not moves:
            return None
        if when is not None:
            return _round(after, change, when)
        return after + LATER * change
    except Exception:
        # Of booleans, for example, there is no difference.
        return None


def _round(after: Any, change: Any, when: int) -> Any:
    """Returns a round value in the place of each whole number that changes."""
    moves = (change != 0) & (change % 1 == 0) & (after % 1 == 0)
    later = _ROUND + when * change
    if isinstance(after, torch.Tensor):
        return torch.where(moves, later, after).to(after.dtype)
    if isinstance(after, numpy.ndarray):
        return numpy.where(moves, later, after).astype(after.dtype)
    return type(after)(later) if moves else None


def _later_text(before: Any, after: Any, when: int | None) -> Any:
    """Returns a text that has grown on, or in which the numbers have."""
    growth = len(after) - len(before)
    if growth > 0 and (after.startswith(before) or after.endswith(before)):
        steps = LATER if when is None else max((_ROUND_LENGTH - len(after)) // growth, 0) + when
        at_end = after.startswith(before)
        part = after[len(before) :] if at_end else after[:growth]
        return after + part * max(steps, 0) if at_end else part * max(steps, 0) + after
    if before == after or not isinstance(after, str):
        return None
    olds, news = (re.findall(r"\d+", text) for text in (before, after))
    if len(olds) != len(news) or re.split(r"\d+", before) != re.split(r"\d+", after):
        return None
    pairs = zip(olds, news, strict=True)
    values = iter([_later(int(old), int(new), when) if old != new else int(new) for old, new in pairs])
    return re.sub(r"\d+", lambda _: str(next(values)), after)
