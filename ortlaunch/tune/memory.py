"""Whether a cell can fit at all, by the low figure of `ortlaunch estimate`.

An estimate takes some ten seconds of processor time. It is asked for only where what was measured leaves a doubt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.devices import gpu_memory, resolve_device
from ortlaunch.config.schema import Device
from ortlaunch.estimate.command import estimate
from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.pruning import MICRO
from ortlaunch.tune.space import Space

_FAR = 0.5
"""A cell that by its micro-batch would need less than this share of the limit is tried without an estimate."""
_SECONDS = 300.0
"""An estimate that does not end in this time says nothing. A model may hang in it."""


class Estimates:
    """Estimates cells, and notes what was found."""

    def __init__(self, space: Space, limit: int | None, notes: Notes) -> None:
        """
        Args:
            space: the cells.
            limit: bytes that a trial may take; None for no limit. On GPUs the memory of a GPU takes its place.
            notes: where estimates are kept.
        """
        self._space = space
        self._on_gpu = resolve_device(space.asked.device) is Device.cuda
        self._limit = gpu_memory() if self._on_gpu else limit
        self._notes = notes
        self.spent = 0.0
        """Seconds of the estimates that were asked for so far, noted ones among them."""
        self._asked: set[str] = set()

    def too_large(self, cell: Cell, seen: Mapping[Cell, Outcome]) -> str | None:
        """Why even the low figure of a cell is above the limit; None if it may fit.

        Args:
            cell: the cell.
            seen: the outcomes so far.
        """
        # The first trial shows more than an estimate of it, and its memory is limited.
        if self._limit is None or not seen or self._is_far(cell, seen):
            return None
        found = self._low(cell)
        low = found.get("low_bytes")
        if low is None or low <= self._limit:
            return None
        return f"needs at least {low / 2**30:.2f} GiB of the {self._limit / 2**30:.2f} GiB it may have (estimate)"

    def _is_far(self, cell: Cell, seen: Mapping[Cell, Outcome]) -> bool:
        """Whether the cell is far below the limit, if memory grows with the micro-batch as a whole."""
        assert self._limit is not None
        if self._on_gpu:
            return False  # What a trial has measured is the memory of the host.
        guesses = [
            outcome.peak_bytes * max(1.0, int(cell[MICRO]) / int(other[MICRO]))
            for other, outcome in seen.items()
            if outcome.ok and outcome.peak_bytes
        ]
        return bool(guesses) and max(guesses) < _FAR * self._limit

    def _low(self, cell: Cell) -> dict[str, Any]:
        key = f"estimate {cell}"
        found = self._notes.get(key)
        if found is None or not _is_estimate(found):
            begun = time.monotonic()
            try:
                report = estimate(self._space.configured(cell), self._limit, quick=True, quiet=True, timeout=_SECONDS)
                found = {"low_bytes": report["machine"]["low_bytes"]}
            except RequestError as error:
                # The cell may be one that cannot be estimated.
                found = {"low_bytes": None, "reason": str(error)}
            found["seconds"] = time.monotonic() - begun
            self._notes.put(key, found)
        if key not in self._asked:
            self._asked.add(key)
            self.spent += found["seconds"]
        return found


def _is_estimate(noted: dict[str, Any]) -> bool:
    return isinstance(noted.get("low_bytes"), int | None) and isinstance(noted.get("seconds"), int | float)
