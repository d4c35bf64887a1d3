"""Keeps the index up to date: one thread looks at the folders of each run root, however many look at the pages.

Each second the folders of new runs and those of runs that go on are looked at; every ten seconds all of them. A run
that is over is read once: what continues it changes its folder's modification time, as for `ortlaunch jobs`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine, Row, delete, func, insert, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from ortlaunch.follow.state import State
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.index.folders import Folders, Stamp
from ortlaunch.serve.index.reading import Reading, fingerprint, read_folders
from ortlaunch.serve.index.tables import IndexedRun
from ortlaunch.serve.queue.tables import Job, JobState

_LOG = logging.getLogger(__name__)
_PASS_SECONDS = 1.0
_SHARE = 0.1
"""The most of one core that all threads take, so that many runs make them slower and nothing else."""
_LONGEST_PAUSE = 10.0
"""However much work a pass was, the next one comes after so long."""
_JUDGE_SECONDS = 5.0
"""A run in whose folder nothing changes is read this often: its process may have died."""
_UNKNOWN_SECONDS = 60.0
"""The same for a run whose launcher is on another machine and gives no sign of life."""
_AGAIN_SECONDS = 60.0
"""A folder that could not be taken into the index is tried again after so long, or when it has changed."""
_BATCH = 100
_STOP_SECONDS = 5.0
"""How long the end of the service waits for the threads."""


_TOLD = ("run_id", "name", "experiment", "state", "reason", "step", "steps", "loss", "started", "ended", "checkpoint")


class Known(NamedTuple):
    """What the index has about a run."""

    changed: int
    is_over: bool
    state: str


class Change(NamedTuple):
    """What one pass has found."""

    places: frozenset[str]
    """The run folders whose rows have changed."""
    gone: tuple[str, ...]
    """The keys of the runs whose folders are gone."""


_NOTHING = Change(frozenset(), ())


def _both(first: Change, second: Change) -> Change:
    return Change(first.places | second.places, first.gone + second.gone)


class RootIndex:
    """The index of the run folders below one root."""

    def __init__(self, engine: Engine, root: Path, others: Iterable[Path] = (), share: float = _SHARE) -> None:
        """
        Args:
            engine: the database.
            root: the run root.
            others: further run roots; those below this one have an index of their own.
            share: the most of one core that its thread takes.
        """
        self.root = root.absolute()
        self._engine = engine
        self._folders = Folders(self.root, frozenset(str(other.absolute()) for other in others))
        self._share = share
        self._known: dict[str, Known] = {}
        self._read_at: dict[str, tuple[float, tuple[int, ...]]] = {}
        """When the run of a folder that goes on was read last, and how the folder looked then."""
        self._is_behind = True
        """Whether folders have changed, or may have, since `_open` was made."""
        self._open: dict[str, Stamp] = {}
        """The folders whose runs may change though their folders do not: all but those of runs that are over."""
        self._left_out: dict[str, tuple[Stamp, float]] = {}
        """The folders that could not be taken: how each looked then, and when that was."""
        self._untold = _NOTHING
        """What the listeners have not been told yet: a pass may break off after a part of its work."""
        self._listeners: list[Callable[[Change], None]] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.passes = 0
        """How often the folders were looked at."""
        self._looked_at = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the folders were looked at."""
        return time.monotonic() - self._looked_at

    def start(self, known: Mapping[str, Known]) -> None:
        """Starts the thread.

        Args:
            known: what the database has about the runs below this root, by their folders.
        """
        self._known = dict(known)
        self._stopping.clear()
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended. One that waits for a file server is left behind."""
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, seconds))

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Calls a function after each pass, in the index's thread."""
        self._listeners.append(listener)

    def forget(self) -> None:
        """Forgets what it has read, because the table was emptied."""
        with self._lock:
            self._known.clear()
            self._read_at.clear()
            self._left_out.clear()
            self._is_behind = True

    def refresh(self) -> None:
        """Looks at the run folders once, and brings the index up to date."""
        with self._lock:
            self._is_behind |= self._folders.look()
            if self._is_behind:
                self._take_look()
            due = iter(self._due())
            while batch := list(islice(due, _BATCH)):
                if self._stopping.is_set():
                    break
                self._take(batch)
            self.passes += 1
            self._looked_at = time.monotonic()
            change, self._untold = self._untold, _NOTHING
        try:
            for listener in self._listeners:
                listener(change)
        except Exception:
            with self._lock:
                self._untold = _both(change, self._untold)
            raise

    def _work(self) -> None:
        is_failing = False
        while not self._stopping.is_set():
            # A pass that waits, for a scheduler or a file server, takes nothing from anybody.
            began = time.thread_time()
            try:
                self.refresh()
                is_failing = False
            except Exception as error:
                # A full disk, a locked database or a file server that is away passes. It is told once, not each second.
                if not is_failing:
                    trace = None if isinstance(error, OSError) else error
                    _LOG.error("the runs below %s cannot be looked at: %s", self.root, error, exc_info=trace)
                is_failing = True
            worked = time.thread_time() - began
            self._stopping.wait(_pause(worked, self._share) if self.passes > 1 else _PASS_SECONDS)

    def _take_look(self) -> None:
        """Takes what was found below the roots, and forgets the runs whose folders are gone."""
        present = self._folders.known
        self._left_out = {place: why for place, why in self._left_out.items() if place in present}
        self._open = {place: stamp for place, stamp in present.items() if not self._is_settled(place, stamp)}
        gone = self._remove([place for place in self._known if place not in present])
        self._untold = _both(self._untold, Change(frozenset(), gone))
        self._is_behind = False

    def _due(self) -> list[tuple[str, Stamp]]:
        """The folders to read, the newest first."""
        self._open = {place: stamp for place, stamp in self._open.items() if not self._is_settled(place, stamp)}
        found = [one for one in self._open.items() if not self._is_left_out(*one) and self._has_moved(*one)]
        return sorted(found, key=_when, reverse=True)

    def _is_settled(self, place: str, stamp: Stamp) -> bool:
        """Whether a run is over and was read as its folder is now."""
        known = self._known.get(place)
        return known is not None and known.is_over and known.changed == stamp.changed

    def _has_moved(self, place: str, stamp: Stamp) -> bool:
        """Whether a run has to be read again."""
        known = self._known.get(place)
        if known is None or known.changed != stamp.changed:
            return True
        at, before = self._read_at.get(place, (0.0, ()))
        longest = _UNKNOWN_SECONDS if known.state == "unknown" else _JUDGE_SECONDS
        return time.monotonic() - at > longest or fingerprint(place) != before

    def _is_left_out(self, place: str, stamp: Stamp) -> bool:
        before, at = self._left_out.get(place, (None, 0.0))
        return before == stamp and time.monotonic() - at < _AGAIN_SECONDS

    def _take(self, batch: list[tuple[str, Stamp]]) -> None:
        """Reads some folders into the index, as far as they can be.

        What one user has put into a run folder must not keep the runs of all others out of the index.
        """
        try:
            self._take_all(batch)
        except OperationalError:
            raise
        except Exception:
            if len(batch) == 1:
                self._leave_out(*batch[0])
                return
        else:
            for place, _ in batch:
                self._left_out.pop(place, None)
            return
        for one in batch:
            self._take([one])

    def _leave_out(self, place: str, stamp: Stamp) -> None:
        before, _ = self._left_out.get(place, (None, 0.0))
        if before != stamp:
            _LOG.exception("the run folder %r is not taken into the index", place)
        self._left_out[place] = (stamp, time.monotonic())

    def _take_all(self, batch: list[tuple[str, Stamp]]) -> None:
        now = time.monotonic()
        # The fingerprints come first: what changes while a folder is read is then seen in the next pass.
        marks = {place: fingerprint(place) for place, _ in batch}
        found = read_folders(batch)
        for reading_ in found:
            self._read_at[reading_.place] = (now, marks[reading_.place])
        with writing(self._engine) as session:
            changed = _write(session, found)
        for one in found:
            values = one.values
            self._known[one.place] = Known(values["changed"], values["is_over"], values["state"])
            if values["is_over"]:
                self._read_at.pop(one.place, None)
        self._untold = _both(self._untold, Change(frozenset(changed), ()))

    def _remove(self, places: list[str]) -> tuple[str, ...]:
        if not places:
            return ()
        keys: list[str] = []
        with writing(self._engine) as session:
            for start in range(0, len(places), _BATCH):
                part = places[start : start + _BATCH]
                query = delete(IndexedRun).where(IndexedRun.place.in_(part)).returning(IndexedRun.key)
                keys += session.scalars(query)
        for place in places:
            self._known.pop(place, None)
            self._read_at.pop(place, None)
        return tuple(keys)


class Index:
    """The index of the run folders below some roots. A root whose file server hangs keeps no other from being read."""

    def __init__(self, engine: Engine, roots: Iterable[Path]) -> None:
        found = list(dict.fromkeys(root.absolute() for root in roots))
        self.roots = [RootIndex(engine, root, found, _SHARE / len(found)) for root in found]
        self._engine = engine
        self._telling = threading.Lock()

    @property
    def passes(self) -> int:
        """How often the folders of every root were looked at."""
        return min(one.passes for one in self.roots)

    @property
    def age(self) -> float:
        """Seconds since the folders of every root were looked at."""
        return max(one.age for one in self.roots)

    def late(self, seconds: float) -> dict[str, float]:
        """Returns the roots that no look has ended at for longer than this, with the seconds since the last one."""
        return {str(one.root): one.age for one in self.roots if one.age > seconds}

    def start(self) -> None:
        """Starts a thread for each root."""
        known = self._known()
        for one in self.roots:
            one.start(known.get(str(one.root), {}))

    def stop(self) -> None:
        """Ends the threads."""
        for one in self.roots:
            one.stop()
        deadline = time.monotonic() + _STOP_SECONDS
        for one in self.roots:
            one.join(deadline - time.monotonic())

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Calls a function after each look at the folders of a root, in the thread of that root; one at a time."""

        def tell(change: Change) -> None:
            with self._telling:
                listener(change)

        for one in self.roots:
            one.listen(tell)

    def ended(self, since: float) -> list[dict[str, Any]]:
        """Returns the runs that have ended after a time, with what others are told of them."""
        columns = [getattr(IndexedRun, name) for name in ("key", *_TOLD)]
        with reading(self._engine) as session:
            query = select(*columns).where(IndexedRun.is_over, IndexedRun.ended > since)
            return [dict(row) for row in session.execute(query).mappings()]

    def refresh(self) -> None:
        """Looks at the run folders once, and brings the index up to date."""
        for one in self.roots:
            one.refresh()

    def rebuild(self) -> int:
        """Makes the index anew from the run folders; returns how many runs it has."""
        with writing(self._engine) as session:
            session.execute(delete(IndexedRun))
        for one in self.roots:
            one.forget()
        self.refresh()
        with reading(self._engine) as session:
            return session.scalar(select(func.count()).select_from(IndexedRun)) or 0

    def _known(self) -> dict[str, dict[str, Known]]:
        """What the database has, by roots. Runs below none of them, which an earlier start had, are forgotten."""
        columns = (IndexedRun.place, IndexedRun.changed, IndexedRun.is_over, IndexedRun.state)
        with reading(self._engine) as session:
            rows = session.execute(select(*columns)).all()
        found: dict[str, dict[str, Known]] = {}
        strangers: list[str] = []
        # The longest one first: a root may lie below another one.
        roots = sorted((str(one.root) for one in self.roots), key=len, reverse=True)
        for place, changed, is_over, state in rows:
            root = next((root for root in roots if place.startswith(f"{root.rstrip('/')}/")), None)
            if root is None:
                strangers.append(place)
            else:
                found.setdefault(root, {})[place] = Known(changed, is_over, state)
        if strangers:
            with writing(self._engine) as session:
                for start in range(0, len(strangers), _BATCH):
                    part = strangers[start : start + _BATCH]
                    session.execute(delete(IndexedRun).where(IndexedRun.place.in_(part)))
        return found


def _pause(worked: float, share: float) -> float:
    """Seconds until the next pass, after one that took so many seconds of a core, for this share of it."""
    return min(_LONGEST_PAUSE, max(_PASS_SECONDS, worked / share))


def _write(session: Session, found: list[Reading]) -> set[str]:
    """Writes rows; returns the places of those that are not what they were."""
    places = [one.place for one in found]
    jobs = _jobs_of(session, found)
    for one in found:
        _join(one.values, jobs.get(one.place))
    query = select(*IndexedRun.__table__.columns).where(IndexedRun.place.in_(places))
    before = {row["place"]: dict(row) for row in session.execute(query).mappings()}
    changed = [one for one in found if before.get(one.place) != one.values]
    if changed:
        session.execute(delete(IndexedRun).where(IndexedRun.place.in_([one.place for one in changed])))
        session.execute(insert(IndexedRun), [one.values for one in changed])
    return {one.place for one in changed}


def _join(values: dict[str, Any], job: Row[*tuple[Any, ...]] | None) -> None:
    """Adds to a run what the queue knows of it."""
    values["job"], values["owner"] = (None, values["unix_user"]) if job is None else (job.id, job.owner)
    # A run whose launcher is gone with its container or machine never says that it has ended. The queue has found out.
    if values["state"] == State.UNKNOWN.value and job is not None and _saw_the_end(job, values["updated"]):
        values |= {
            "state": job.outcome,
            "reason": job.reason,
            "ended": job.ended,
            "is_over": True,
            "seconds_left": None,
        }
    elif values["state"] == State.STOPPED.value and job is not None and _saw_the_end(job, values["updated"]):
        # The queue also knows what the run had taken too much of.
        values["reason"] = job.reason


def _saw_the_end(job: Row[*tuple[Any, ...]], updated: float) -> bool:
    """Whether a job is over, and its run was not continued after it, for example from a command line elsewhere."""
    return bool(job.state == JobState.ENDED and job.outcome and job.ended >= updated)


def _jobs_of(session: Session, found: list[Reading]) -> dict[str, Row[*tuple[Any, ...]]]:
    """The latest job of each run that has begun. One that still waits to go on is not the run's yet."""
    ids = [one.values["run_id"] for one in found]
    columns = (Job.run_dir, Job.id, Job.owner, Job.state, Job.outcome, Job.reason, Job.ended)
    query = select(*columns).where(Job.run_id.in_(ids), Job.started.is_not(None)).order_by(Job.number)
    return {job.run_dir: job for job in session.execute(query)}


def _when(folder: tuple[str, Stamp]) -> str:
    """The name of a run folder, which begins with the time when it was made."""
    return folder[0].rpartition("/")[2]
