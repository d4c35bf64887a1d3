"""Which rows of the list have changed, in numbered steps: a page that comes back asks for those after its number."""

from __future__ import annotations

import secrets
import time
from typing import Any

from sqlalchemy import func, select

from ortlaunch.serve.database import reading
from ortlaunch.serve.index.indexer import Change
from ortlaunch.serve.queue.tables import OPEN_STATES, Job
from ortlaunch.serve.service import Service

_KEPT = 500
"""Steps that are kept for pages that come back."""
_FRESH_SECONDS = 10.0
"""A page that was made so long ago may lack changes from before its stream began."""
_NEWEST_JOBS = 100
"""So many of the latest jobs are looked at though they may be over."""


class Changes:
    """The latest changes. They are noted in the threads of the index, one at a time, and read in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._epoch = secrets.token_hex(3)
        """Another start of the service does not know the numbers of this one."""
        self._kept: tuple[tuple[int, float, Change], ...] = ()
        self._jobs: dict[str, tuple[object, ...]] = {}
        """The open jobs as they were last, by their run folders."""
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
        jobs = self._jobs_now()
        moved = {place for place in jobs.keys() | self._jobs.keys() if jobs.get(place) != self._jobs.get(place)}
        self._jobs = jobs
        if not change.places and not moved and not change.gone:
            return
        step = (self.number + 1, time.monotonic(), Change(change.places | moved, change.gone))
        self._kept = (*self._kept[1 - _KEPT :], step)
        self.number += 1

    def _jobs_now(self) -> dict[str, tuple[Any, ...]]:
        """What the rows show of the queue's open and newest jobs, by their run folders."""
        columns = (Job.run_dir, Job.id, Job.state, Job.reason, Job.priority)
        # Of a job that was submitted and taken back since the last call, both calls would see nothing otherwise.
        newest = select(func.max(Job.number) - _NEWEST_JOBS).scalar_subquery()
        looked_at = Job.state.in_(OPEN_STATES) | (Job.number > newest)
        with reading(self._service.engine) as session:
            found = session.execute(select(*columns).where(looked_at).order_by(Job.number)).all()
        positions = self._service.queue.positions()
        return {place: (job, *rest, positions.get(job)) for place, job, *rest in found}
