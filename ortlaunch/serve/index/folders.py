"""Finds the run folders below a run root, and those that have changed since the last look."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.user import name_of
from ortlaunch.run.folders import has_runs_name

_WHOLE_SECONDS = 10.0
"""A run that goes on changes its own folder, which the folder of its experiment does not show: all are looked at."""
_UNSURE_NS = 2_000_000_000
"""A folder that was changed so shortly before it was read may have changed again with the same time."""
_LATEST_NS = 2**62
"""A later time is taken for this one: anybody can give a folder a time that SQLite's integers do not hold."""


class Stamp(NamedTuple):
    """What the listing of folders says about a run folder."""

    changed: int
    """Its modification time in nanoseconds."""
    user: int
    """The number of its owner."""


@dataclass
class Folders:
    """The run folders below a root. Links are not followed: they could lead to what is not a run."""

    root: Path
    others: frozenset[str] = frozenset()
    """Further run roots. They may lie below this one, and are looked at by themselves."""
    known: dict[str, Stamp] = field(default_factory=dict)
    """All run folders, by their paths."""
    _experiments: dict[str, int] = field(default_factory=dict)
    """The time for which the content of a folder of runs is known; 0 if it may have changed since."""
    _whole_at: float = -_WHOLE_SECONDS

    def look(self) -> bool:
        """Brings `known` up to date; returns whether something may have changed.

        Raises:
            OSError: the root cannot be read.
        """
        whole = time.monotonic() - self._whole_at >= _WHOLE_SECONDS
        if whole:
            self._whole_at = time.monotonic()
        experiments = dict(experiments_below(self.root, self.others))
        stale = {place for place, changed in experiments.items() if whole or self._experiments.get(place) != changed}
        gone = self._experiments.keys() - experiments.keys()
        if not stale and not gone:
            return False
        sure = time.time_ns() - _UNSURE_NS
        self._experiments = {place: changed if changed < sure else 0 for place, changed in experiments.items()}
        kept = {place: stamp for place, stamp in self.known.items() if place.rpartition("/")[0] not in stale | gone}
        self.known = kept | {place: stamp for experiment in stale for place, stamp in _runs_in(experiment)}
        return True


def experiments_below(root: Path, others: frozenset[str] = frozenset()) -> Iterator[tuple[str, int]]:
    """Yields the folders below a run root that may hold run folders, with their modification times.

    These are ``ROOT/<experiment>``, and ``ROOT/<user>/<experiment>`` where the folder belongs to the user of its name.

    Args:
        root: the run root.
        others: further run roots, which are left out.

    Raises:
        OSError: the root cannot be read, for example because its file server is away. Its runs are still there then.
    """
    for entry, stamp in _folders(str(root), others, is_root=True):
        yield entry.path, stamp.changed
        if entry.name == name_of(stamp.user):
            yield from ((inner.path, found.changed) for inner, found in _folders(entry.path))


def _runs_in(experiment: str) -> Iterator[tuple[str, Stamp]]:
    return ((entry.path, stamp) for entry, stamp in _folders(experiment) if has_runs_name(entry.name))


def _folders(
    place: str, others: frozenset[str] = frozenset(), *, is_root: bool = False
) -> Iterator[tuple[os.DirEntry[str], Stamp]]:
    """Yields the folders in a folder, without hidden ones, such as those of the service, and without `others`."""
    try:
        with os.scandir(place) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".") and _is_text(entry.name)]
    except FileNotFoundError:
        return
    except OSError:
        if is_root:
            raise
        return
    for entry in found:
        # Not even asked about: a root may be on a file server that hangs.
        if entry.path in others:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                yield entry, stamp_of(stat)
        except OSError:
            continue


def stamp_of(stat: os.stat_result) -> Stamp:
    """Returns what is kept of a folder's status."""
    return Stamp(max(-_LATEST_NS, min(_LATEST_NS, stat.st_mtime_ns)), stat.st_uid)


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8. Neither the database nor JSON can hold another."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
