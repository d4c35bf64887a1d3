"""Reads run folders into rows of the index."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import public_text
from ortlaunch.base.user import name_of
from ortlaunch.follow.rows import Row, Survey
from ortlaunch.launch.jobs import of_user
from ortlaunch.run.folders import folder_at
from ortlaunch.run.key import RunKey
from ortlaunch.run.record import Record, read_record
from ortlaunch.run.run import Run
from ortlaunch.serve.index.folders import Stamp

_LONGEST_NAME, _LONGEST_REASON = 200, 2000
_LARGEST_STEP = 2**62


@dataclass(frozen=True)
class Reading:
    """One run folder as it was read."""

    place: str
    values: dict[str, Any]
    """The columns of `IndexedRun`."""


def read_folders(places: Iterable[tuple[str, Stamp]]) -> list[Reading]:
    """Reads run folders. What is no run folder yet, or no more, is left out.

    Each scheduler is asked once for each owner, and not at all if it has answered within the last five seconds.

    Args:
        places: the folders, with what their listing says.
    """
    found: list[tuple[Record, Stamp]] = []
    for place, stamp in places:
        try:
            found.append((read_record(folder_at(Path(place))), stamp))
        except (RequestError, OSError):
            continue
    by_owner: dict[int, list[tuple[Record, Stamp]]] = {}
    for record, stamp in found:
        by_owner.setdefault(stamp.user, []).append((record, stamp))
    return [reading for user, own in by_owner.items() for reading in _judged(user, own)]


def _judged(user: int, own: list[tuple[Record, Stamp]]) -> Iterator[Reading]:
    """Yields the rows of one owner's runs, by what schedulers say of that owner's jobs."""
    with of_user(name_of(user)):
        rows = Survey([record.folder for record, _ in own]).rows_of([record for record, _ in own])
    for (record, stamp), row in zip(own, rows, strict=True):
        yield Reading(record.folder.place, _values(record, row, stamp))


def fingerprint(place: str) -> tuple[int, ...]:
    """What changes in a run folder while the run goes on; equal as long as nothing has changed."""
    run = Run(Path(place))
    return tuple(part for path in (run.journal_file, run.beat_file(0), run.stop_file) for part in _stat(path))


def made_at(when: str) -> float | None:
    """The time in the name of a run folder, ``20260131-235959``; None if it is none."""
    try:
        return time.mktime(time.strptime(when, "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return None


def _values(record: Record, row: Row, stamp: Stamp) -> dict[str, Any]:
    tokens, samples = row.rates
    rate = tokens if tokens is not None else samples
    loss = row.last_loss
    last = record.state.last
    started = made_at(record.folder.time) or stamp.changed / 1e9
    updated = last / 1000 if last is not None else stamp.changed / 1e9
    ended = (record.state.ended_at or last or 0) / 1000 or updated
    return {
        "place": record.folder.place,
        "key": str(RunKey.of_folder(record.folder.path.name))[:64],
        "run_id": record.folder.run_id[:64],
        "name": public_text(row.name)[:_LONGEST_NAME],
        "experiment": public_text(row.experiment)[:_LONGEST_NAME],
        "unix_user": name_of(stamp.user),
        "state": row.state.value,
        "reason": public_text(row.reason)[:_LONGEST_REASON],
        "is_over": row.is_over,
        "step": _count(row.step),
        "steps": _count(row.steps),
        "loss": _finite(loss),
        "diverged": loss is not None and not math.isfinite(loss),
        "rate": _finite(rate),
        "rate_unit": "" if rate is None else "tokens/s" if tokens is not None else "samples/s",
        "seconds_left": _finite(row.left_seconds),
        "started": started,
        "updated": updated,
        "ended": ended if row.is_over else None,
        "launcher": public_text(row.launcher)[:64],
        "scheduler_job": row.job_id or "",
        "nodes": row.nodes,
        "restarts": row.restarts,
        "checkpoint": row.checkpoint[:64],
        "unsent": record.run.unsent_bytes(),
        "changed": stamp.changed,
    }


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _count(value: int | None) -> int | None:
    return None if value is None else max(-_LARGEST_STEP, min(_LARGEST_STEP, value))
