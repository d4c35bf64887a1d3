"""The search for the largest micro-batch that fits, with few traces: each takes seconds for a large model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ortlaunch.base.errors import RequestError

_TRACES = 5
"""Most micro-batches that are tried beside the first one."""
_NEAR_ENOUGH = 20
"""The search ends within this part of the best micro-batch."""
_PLAINLY_ABOVE = 1.02
"""What lines through two traces near by find above the limit by this factor is not traced."""
_NEAR_BY = 1.5
"""The micro-batches of two such traces differ by this factor at most."""


@dataclass(frozen=True)
class Sized:
    """The memory with one micro-batch, in bytes."""

    high: int
    """The high figure of a machine."""
    first: dict[str, int]
    """The high figure of each phase of its first worker."""
    others: dict[str, int]
    """The same of another worker."""


class Search:
    """Finds it by lines: the memory of each phase grows nearly by a line with the micro-batch."""

    def __init__(self, sized: Callable[[int], Sized], limit: int, workers: int, most: int, stays: int) -> None:
        """
        Args:
            sized: the memory with a micro-batch. It raises a RequestError where a step of this size fails.
            limit: bytes that a machine has.
            workers: workers of a machine.
            most: the largest micro-batch to look at.
            stays: bytes of a worker that do not grow with the micro-batch.
        """
        self._sized = sized
        self._limit = limit
        self._workers = workers
        self._least = 1
        self._most = most
        self._stays = stays
        self._known: dict[int, Sized] = {}

    def largest(self, size: int) -> int:
        """The largest micro-batch that was tried and fits, 0 if none did; `size` is tried first."""
        self._known[size] = self._sized(size)
        was_beside = False
        for _ in range(_TRACES):
            inside, outside = self._fits, self._does_not_fit
            lowest = max(inside + max(1, inside // _NEAR_ENOUGH), self._least)
            if outside <= lowest or self._is_plainly_outside(lowest):
                break
            highest = outside - (max(1, outside // (_NEAR_ENOUGH + 1)) if outside in self._known else 1)
            # Where the trace just beside another was not the last one, lines are of no use.
            guess = max(lowest, (inside + outside) // 2 if was_beside else min(self._guess(), highest))
            was_beside = not was_beside and guess in (lowest, highest)
            try:
                self._known[guess] = self._sized(guess)
            except RequestError:
                self._leave_out(guess)
                was_beside = False
        return self._fits

    def _leave_out(self, size: int) -> None:
        """Looks only at micro-batches on the known ones' side of one whose step fails."""
        if size < min(self._known):
            # Batch normalization refuses one sample, so a smaller one fails too.
            self._least = size + 1
        else:
            self._most = size - 1

    @property
    def _fits(self) -> int:
        """The largest micro-batch that is known to fit; 0 if none is."""
        return max((one for one, found in self._known.items() if found.high <= self._limit), default=0)

    @property
    def _does_not_fit(self) -> int:
        """The smallest micro-batch that is known not to fit."""
        return min([self._most + 1, *(one for one, found in self._known.items() if found.high > self._limit)])

    def _guess(self) -> int:
        """The largest micro-batch that is likely to fit, by lines through a trace on each side of it.

        Without one on each side, by the two that are nearest to the limit. After one trace, by what does not stay.
        """
        if len(self._known) == 1:
            ((size, found),) = self._known.items()
            grows = found.first["step"] - self._stays
            return int(size * (self._limit / self._workers - self._stays) / max(grows, 1))
        ends = [one for one in (self._fits, self._does_not_fit) if one in self._known]
        if len(ends) < 2:
            ends = sorted(self._known, key=lambda one: abs(self._known[one].high - self._limit))[:2]
        high = self._lines_through(*ends)
        least, most = 0, self._most + 1
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if high(middle) <= self._limit else (least, middle)
        return least

    def _is_plainly_outside(self, size: int) -> bool:
        """Whether a micro-batch beyond the largest that fits need not be traced to know that it does not."""
        inside = self._fits
        others = sorted(self._known.keys() - {inside}, key=lambda one: abs(one - inside))
        if inside == 0 or not others or max(inside, others[0]) > _NEAR_BY * min(inside, others[0]):
            return False
        return self._lines_through(inside, others[0])(size) > _PLAINLY_ABOVE * self._limit

    def _lines_through(self, near: int, far: int) -> Callable[[int], float]:
        """The high figure of a machine by the micro-batch: the highest of lines through each phase of two traces."""
        one, other = self._known[near], self._known[far]

        def line(at_near: dict[str, int], at_far: dict[str, int], size: int) -> float:
            beyond = (size - near) / (far - near)
            return max(high + (at_far[name] - high) * beyond for name, high in at_near.items())

        def plain(size: int) -> float:
            others = line(one.others, other.others, size)
            return line(one.first, other.first, size) + (self._workers - 1) * others

        # What earlier runs have measured corrects the whole.
        factor = one.high / plain(near)
        return lambda size: factor * plain(size)
