"""Which rows of the list have changed, in numbered steps: a page that comes back asks for those after its number."""

from __future__ import annotations

import logging
import secrets
import time

from sqlalchemy.exc import SQLAlchemyError

from ortlaunch.serve.index.indexer import Change
from ortlaunch.serve.index.jobs import OfRun
from ortlaunch.serve.service import Service

_LOG = logging.getLogger(__name__)
_KEPT = 500
"""Steps that are kept for pages that come back."""
_FRESH_SECONDS = 10.0
"""A page that was made so long ago may lack changes from before its stream began."""


class Changes:
    """The latest changes. They are noted in the threads of the index, one at a time, and read in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._epoch = secrets.token_hex(3)
        """Another start of the service does not know the numbers of this one."""
        self._kept: tuple[tuple[int, float, Change], ...] = ()
        self._jobs: dict[str, OfRun] = {}
        self._positions: dict[str, int] = {}
        """The places of the waiting jobs in the queue, by their ids."""
        self.number = 0
        """The latest step."""
        if service.runs is not None:
            service.runs.listen(self._note)

    def after(self, number: int) -> tuple[int, Change | None]:
        """Returns the latest step, and what has changed after a step; None if that is not known any more."""
        kept = self._kept
        now = kept[-1][0] if kept else 0
        if not now - len(kept) <= number <= now:
            return now, None
        later = [change for step, _, change in kept if step > number]
        places = frozenset().union(*(one.places for one in later))
        return now, Change(places, tuple(key for one in later for key in one.gone))

    def has_moved(self, place: str, number: int) -> bool:
        """Whether the row of a run may have changed after a step."""
        if number == self.number:
            return False
        change = self.after(number)[1]
        return change is None or place in change.places

    def position(self, number: int) -> str:
        """Returns the text that names a step to browsers."""
        return f"{self._epoch}.{number}"

    def number_of(self, position: str | None) -> int:
        """Returns the step that a browser names; of one that has just loaded its page, the one from before that."""
        if position is None:
            since = time.monotonic() - _FRESH_SECONDS
            recent = [step for step, at, _ in self._kept if at > since]
            return recent[0] - 1 if recent else self.number
        epoch, _, text = position.partition(".")
        return int(text) if epoch == self._epoch and text.isdecimal() and len(text) < 16 else -1

    def _note(self, change: Change) -> None:
        """Takes what the index has found after a look at the folders."""
        moved = self._moved()
        if change.places or moved or change.gone:
            step = (self.number + 1, time.monotonic(), Change(change.places | moved, change.gone))
            self._kept = (*self._kept[1 - _KEPT :], step)
            self.number += 1

    def _moved(self) -> set[str]:
        """The run folders whose jobs have changed, or have another place in the queue; none if it cannot be asked."""
        try:
            jobs, positions = self._service.runs.jobs.now(), self._service.queue.positions()
        except SQLAlchemyError:
            _LOG.exception("it could not be asked which jobs have changed")
            return set()
        moved = {place for place, of_run in jobs.items() if self._jobs.get(place) != of_run}
        if positions != self._positions:
            by_id = {of_run.latest.id: place for place, of_run in jobs.items()}
            ids = {one for one, _ in positions.items() ^ self._positions.items()}
            moved |= {by_id[one] for one in ids if one in by_id}
        self._jobs, self._positions = jobs, positions
        return moved
