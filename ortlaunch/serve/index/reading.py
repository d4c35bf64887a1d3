"""Reads run folders into what the list keeps of them in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import public_text
from ortlaunch.base.user import name_of
from ortlaunch.follow.rows import Row, Survey
from ortlaunch.launch.jobs import of_user
from ortlaunch.run.folders import RunFolder, folder_at
from ortlaunch.run.key import RunKey
from ortlaunch.run.record import Record, read_record
from ortlaunch.run.run import Run
from ortlaunch.serve.index.folders import Stamp

_LONGEST_NAME, _LONGEST_REASON = 200, 2000


@dataclass(frozen=True, slots=True)
class Listed:
    """What the list keeps of one run folder. Times are seconds since the epoch."""

    place: str
    """The path of the run folder; it is `run_dir` of the run's jobs in the queue."""
    key: str
    """``<date>-<time>-<id>``, the id in the API."""
    run_id: str
    name: str
    experiment: str
    started: float
    """When the run was made."""
    updated: float
    """When the run last journalled something."""
    state: str
    """A value of `ortlaunch.follow.state.State`, by the folder and what schedulers say."""
    reason: str
    unix_user: str = ""
    """The owner of the folder."""
    changed: int = 0
    """The folder's modification time in nanoseconds, for which this holds if the run is over."""
    is_over: bool = False
    has_end: bool = False
    """Whether its folder says how it has ended."""
    ended: float | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    diverged: bool = False
    """Whether the latest loss is no finite number, which JSON cannot hold."""
    rate: float | None = None
    rate_unit: str = ""
    seconds_left: float | None = None
    nodes: int = 1
    restarts: int = 0
    checkpoint: str = ""
    unsent: int = 0
    """Bytes of the journal that a tracking server has not got yet."""
    params: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def read_folders(places: Iterable[tuple[str, Stamp]]) -> list[tuple[Listed, RunFolder, Row]]:
    """Reads run folders. What is no run folder yet, or no more, is left out.

    Each scheduler is asked once for each owner, and not at all if it has answered within the last five seconds.

    Args:
        places: the folders, with what their listing says.

    Returns:
        What the list keeps of each, and the folder and the row that it was made of.
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
    return [one for user, own in by_owner.items() for one in _judged(user, own)]


def _judged(user: int, own: list[tuple[Record, Stamp]]) -> Iterator[tuple[Listed, RunFolder, Row]]:
    """Yields one owner's runs, by what schedulers say of that owner's jobs."""
    with of_user(name_of(user)):
        rows = Survey([record.folder for record, _ in own]).rows_of([record for record, _ in own])
    for (record, stamp), row in zip(own, rows, strict=True):
        yield listed(record.folder, row, stamp), record.folder, row


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


def listed(folder: RunFolder, row: Row, stamp: Stamp) -> Listed:
    """Returns what the list keeps of a run.

    Args:
        folder: its folder.
        row: the run.
        stamp: what the listing of folders says about its folder.
    """
    tokens, samples = row.rates
    rate = tokens if tokens is not None else samples
    loss = row.last_loss
    updated = row.updated if row.updated is not None else stamp.changed / 1e9
    return Listed(
        place=folder.place,
        changed=stamp.changed,
        key=str(RunKey.of_folder(folder.path.name))[:64],
        run_id=folder.run_id[:64],
        name=public_text(row.name)[:_LONGEST_NAME],
        experiment=public_text(row.experiment)[:_LONGEST_NAME],
        unix_user=name_of(stamp.user),
        state=row.state.value,
        reason=public_text(row.reason)[:_LONGEST_REASON],
        is_over=row.is_over,
        has_end=row.ended is not None,
        step=row.step,
        steps=row.steps,
        loss=_finite(loss),
        diverged=loss is not None and not math.isfinite(loss),
        rate=_finite(rate),
        rate_unit="" if rate is None else "tokens/s" if tokens is not None else "samples/s",
        seconds_left=_finite(row.left_seconds),
        started=made_at(folder.time) or stamp.changed / 1e9,
        updated=updated,
        ended=(row.ended or updated) if row.is_over else None,
        nodes=row.nodes,
        restarts=row.restarts,
        checkpoint=row.checkpoint[:64],
        unsent=row.unsent_bytes,
        params=row.params,
        figures=row.figures,
    )


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
