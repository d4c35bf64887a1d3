"""Keeps the list of runs up to date: one thread looks at the folders of each run root, however many look at the pages.

Each second the folders of new runs and those of runs that go on are looked at; every ten seconds all of them. A run
that is over is read once: what continues it changes its folder's modification time, as for `ortlaunch jobs`, whose
index of such runs is the list's at the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from ortlaunch.base.errors import RequestError
from ortlaunch.follow import index as over
from ortlaunch.follow.rows import FIELDS, Row, row_from
from ortlaunch.run.folders import RunFolder, folder_at
from ortlaunch.serve.index.folders import Folders, Stamp
from ortlaunch.serve.index.jobs import QueueJobs
from ortlaunch.serve.index.reading import Listed, fingerprint, listed, read_folders
from ortlaunch.serve.service import Service

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
"""A folder that could not be taken is tried again after so long, or when it has changed."""
_SAVE_SECONDS = 300.0
"""How often the runs that are over are written to the index of `ortlaunch jobs`, for the next start."""
_BATCH = 100
_START_SECONDS = 3.0
"""How long the start of the service waits for the first look at all folders."""
_STOP_SECONDS = 5.0
"""How long the end of the service waits for the threads."""


class Change(NamedTuple):
    """What one pass has found."""

    places: frozenset[str]
    """The run folders whose rows have changed."""
    gone: tuple[str, ...]
    """The keys of the runs whose folders are gone."""


class RootIndex:
    """The runs below one root."""

    def __init__(self, root: Path, others: Iterable[Path] = (), share: float = _SHARE) -> None:
        """
        Args:
            root: the run root.
            others: further run roots; those below this one are looked at by themselves.
            share: the most of one core that its thread takes.
        """
        self.root = root.absolute()
        self.runs: dict[str, Listed] = {}
        """The runs by their folders. Other threads read it while this one's writes it."""
        self._folders = Folders(self.root, frozenset(str(other.absolute()) for other in others))
        self._share = share
        self._over: dict[Path, over.Index] = {}
        """In the first pass, what `ortlaunch jobs` knows of runs that are over."""
        self._unsaved: list[tuple[RunFolder, Row]] = []
        """Runs that are over, and that it does not know."""
        self._saved_at = time.monotonic()
        self._read_at: dict[str, tuple[float, tuple[int, ...]]] = {}
        """When the run of a folder that goes on was read last, and how the folder looked then."""
        self._open: dict[str, Stamp] = {}
        """The folders whose runs may change though their folders do not: all but those of runs that are over."""
        self._left_out: dict[str, tuple[Stamp, float]] = {}
        """The folders that could not be taken: how each looked then, and when that was."""
        self._listeners: list[Callable[[Change], None]] = []
        self._stopping = threading.Event()
        self.has_looked = threading.Event()
        """Whether the first pass has ended, or cannot be made now."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.passes = 0
        """How often the folders were looked at."""
        self._looked_at = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the folders were looked at."""
        return time.monotonic() - self._looked_at

    def start(self) -> None:
        """Starts the thread."""
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

    def refresh(self) -> None:
        """Looks at the run folders once, and brings the list up to date."""
        with self._lock:
            changed: set[str] = set()
            gone: tuple[str, ...] = ()
            try:
                if self._folders.look() or not self.passes:
                    gone = self._take_look()
                due = iter(self._due())
                while batch := list(islice(due, _BATCH)):
                    if self._stopping.is_set():
                        break
                    changed |= self._take(batch)
                self._over.clear()
                self.passes += 1
                self._looked_at = time.monotonic()
            finally:
                change = Change(frozenset(changed), gone)
        for listener in self._listeners:
            listener(change)

    def save(self) -> None:
        """Writes the runs that are over to the index of `ortlaunch jobs`."""
        self._saved_at = time.monotonic()
        unsaved, self._unsaved = self._unsaved, []
        present = list(self._folders.known)
        for root in {folder.root for folder, _ in unsaved}:
            index = over.Index(root)
            for folder, row in unsaved:
                if folder.root == root:
                    index.put(folder, row.job_id, row.as_dict())
            index.save({place for place in present if Path(place).parents[1] == root})

    def _work(self) -> None:
        is_failing = False
        while not self._stopping.is_set():
            # A pass that waits, for a scheduler or a file server, takes nothing from anybody.
            began = time.thread_time()
            try:
                self.refresh()
                if time.monotonic() - self._saved_at > _SAVE_SECONDS or self.passes == 1:
                    self.save()
                is_failing = False
            except Exception as error:
                # A file server that is away passes. It is told once, not each second.
                if not is_failing:
                    trace = None if isinstance(error, OSError) else error
                    _LOG.error("the runs below %s cannot be looked at: %s", self.root, error, exc_info=trace)
                is_failing = True
            self.has_looked.set()
            worked = time.thread_time() - began
            self._stopping.wait(_pause(worked, self._share) if self.passes > 1 else _PASS_SECONDS)
        if not is_failing:
            self.save()

    def _take_look(self) -> tuple[str, ...]:
        """Takes what was found below the root; returns the keys of the runs whose folders are gone."""
        present = self._folders.known
        self._left_out = {place: why for place, why in self._left_out.items() if place in present}
        self._open = {place: stamp for place, stamp in present.items() if not self._is_settled(place, stamp)}
        gone = [place for place in self.runs if place not in present]
        for place in gone:
            self._read_at.pop(place, None)
        return tuple(self.runs.pop(place).key for place in gone)

    def _due(self) -> list[tuple[str, Stamp]]:
        """The folders to read, the newest first."""
        self._open = {place: stamp for place, stamp in self._open.items() if not self._is_settled(place, stamp)}
        found = [one for one in self._open.items() if not self._is_left_out(*one) and self._has_moved(*one)]
        return sorted(found, key=_when, reverse=True)

    def _is_settled(self, place: str, stamp: Stamp) -> bool:
        """Whether a run is over and was read as its folder is now."""
        known = self.runs.get(place)
        return known is not None and known.is_over and known.changed == stamp.changed

    def _has_moved(self, place: str, stamp: Stamp) -> bool:
        """Whether a run has to be read again."""
        known = self.runs.get(place)
        if known is None or known.changed != stamp.changed:
            return True
        at, before = self._read_at.get(place, (0.0, ()))
        longest = _UNKNOWN_SECONDS if known.state == "unknown" else _JUDGE_SECONDS
        return time.monotonic() - at > longest or fingerprint(place) != before

    def _is_left_out(self, place: str, stamp: Stamp) -> bool:
        before, at = self._left_out.get(place, (None, 0.0))
        return before == stamp and time.monotonic() - at < _AGAIN_SECONDS

    def _take(self, batch: list[tuple[str, Stamp]]) -> set[str]:
        """Reads some folders, as far as they can be; returns those whose rows are not what they were.

        What one user has put into a run folder must not keep the runs of all others out of the list.
        """
        try:
            changed = self._take_all(batch)
        except Exception:
            if len(batch) > 1:
                return {place for one in batch for place in self._take([one])}
            self._leave_out(*batch[0])
            return set()
        for place, _ in batch:
            self._left_out.pop(place, None)
        return changed

    def _leave_out(self, place: str, stamp: Stamp) -> None:
        before, _ = self._left_out.get(place, (None, 0.0))
        if before != stamp:
            _LOG.exception("the run folder %r is not taken into the list", place)
        self._left_out[place] = (stamp, time.monotonic())

    def _take_all(self, batch: list[tuple[str, Stamp]]) -> set[str]:
        now = time.monotonic()
        known = [] if self.passes else [one for place, stamp in batch if (one := self._known(place, stamp)) is not None]
        there = {one.place for one in known}
        batch = [one for one in batch if one[0] not in there]
        # The fingerprints come first: what changes while a folder is read is then seen in the next pass.
        marks = {place: fingerprint(place) for place, _ in batch}
        found = read_folders(batch)
        for run, folder, row in found:
            if run.is_over:
                self._read_at.pop(run.place, None)
                self._unsaved.append((folder, row))
            else:
                self._read_at[run.place] = (now, marks[run.place])
        runs = [*known, *(run for run, _, _ in found)]
        changed = {run.place for run in runs if self.runs.get(run.place) != run}
        self.runs.update((run.place, run) for run in runs)
        return changed

    def _known(self, place: str, stamp: Stamp) -> Listed | None:
        """What `ortlaunch jobs` knows of a run that is over; None if its folder must be read."""
        try:
            folder = folder_at(Path(place))
        except (RequestError, OSError):
            return None
        index = self._over.get(folder.root)
        if index is None:
            index = self._over[folder.root] = over.Index(folder.root)
        entry = index.get(folder)
        if entry is None or entry.row is None or entry.row.keys() != FIELDS:
            return None
        return listed(folder, row_from(entry.row), stamp)


class Index:
    """The runs below some roots. A root whose file server hangs keeps no other from being read."""

    def __init__(self, engine: Engine, roots: Iterable[Path]) -> None:
        found = list(dict.fromkeys(root.absolute() for root in roots))
        self.roots = [RootIndex(root, found, _SHARE / len(found)) for root in found]
        self.jobs = QueueJobs(engine)
        """The jobs of the queue, which the list shows with the runs."""
        self._telling = threading.Lock()

    @property
    def runs(self) -> dict[str, Listed]:
        """All runs by their folders, as they are now."""
        return {place: run for root in self.roots for place, run in dict(root.runs).items()}

    def run_at(self, place: str) -> Listed | None:
        """Returns the run in a folder; None if there is none."""
        return next((run for root in self.roots if (run := root.runs.get(place)) is not None), None)

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
        """Starts a thread for each root, and waits a little for what they find first: who comes then finds the runs."""
        for one in self.roots:
            one.start()
        deadline = time.monotonic() + _START_SECONDS
        for one in self.roots:
            one.has_looked.wait(max(0.0, deadline - time.monotonic()))

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

    def refresh(self) -> None:
        """Looks at the run folders once, and brings the list up to date."""
        for one in self.roots:
            one.refresh()


def make_runs(service: Service) -> Index:
    """Returns the runs of a service."""
    return Index(service.engine, service.settings.roots)


def _pause(worked: float, share: float) -> float:
    """Seconds until the next pass, after one that took so many seconds of a core, for this share of it."""
    return min(_LONGEST_PAUSE, max(_PASS_SECONDS, worked / share))


def _when(folder: tuple[str, Stamp]) -> str:
    """The name of a run folder, which begins with the time when it was made."""
    return folder[0].rpartition("/")[2]
