"""From journal events to what MLflow takes: its alphabet, its limits, each point once."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ortlaunch.run import events
from ortlaunch.run.events import Event

PARAM_LIMIT = 6000
"""Characters that MLflow keeps of a parameter's value."""
TAG_LIMIT = 5000
"""Characters that every MLflow release and database keeps of a tag's value."""
KEY_LIMIT = 250
FAILURE_TAG = "ortlaunch.failure"


@dataclass(frozen=True)
class Point:
    """One value of one metric; `timestamp` in milliseconds."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Points:
    """Metric values to log."""

    points: list[Point]


@dataclass(frozen=True)
class Params:
    """Parameters to set, once and for all."""

    values: dict[str, str]
    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Tags:
    """Tags to set; later ones replace earlier ones."""

    values: dict[str, str]
    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Artifact:
    """A file or folder to upload, its path relative to the run folder unless it lies elsewhere."""

    path: str
    artifact_path: str


@dataclass(frozen=True)
class Input:
    """Data that the run trains on."""

    name: str
    digest: str
    source: str
    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Reopened:
    """A new attempt of a run that had ended."""

    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Ended:
    """The run is over; `t` in milliseconds."""

    status: str
    t: int


Operation = Points | Params | Tags | Artifact | Input | Reopened | Ended


class Translator:
    """Turns a journal's events, in order and from its beginning, into operations.

    It remembers what it has seen: a resumed run journals steps again, and MLflow would take them as further points;
    a parameter that an attempt changes would make MLflow refuse the whole batch.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What was left out or changed, for the log."""
        self._bits: dict[str, int] = {}
        self._seen: dict[int, int] = {}  # step -> one bit per metric key: small also after a million steps
        self._params: dict[str, str] = {}
        self._ended = False
        self._failed = False
        self._told = 0
        """When parameters or tags came last."""
        self._clear()

    def translate(self, taken: Iterable[Event]) -> list[Operation]:
        """The operations for the next events, as few as their order allows."""
        operations: list[Operation] = []
        for event in taken:
            self._take(event, operations)
        self._flush(operations)
        return operations

    def _take(self, event: Event, operations: list[Operation]) -> None:
        if isinstance(event, events.ParamsSet | events.Tagged | events.WorkerFailed):
            self._told = event.t
        match event:
            case events.Started():
                self._start(operations, event.t)
            case events.ParamsSet():
                self._add_params(event)
            case events.Tagged():
                self._tags |= {safe_key(key): fitted(value, TAG_LIMIT) for key, value in event.values.items()}
            case events.Measured():
                self._points += self._fresh(event)
            case events.Rewound():
                # Its steps come again, and `_fresh` lets each (key, step) through once.
                self.notes.append(f"training goes on after step {event.step}: {event.reason}")
            case events.Requeued():
                self.notes.append(f"attempt {event.attempts} is over and another follows: {event.reason}")
            case events.FileKept():
                operations.append(Artifact(event.path, event.artifact_path))
            case events.DatasetUsed():
                name, source = fitted(event.name, 500), fitted(event.source, 9000)
                operations.append(Input(name, event.digest[:36], source, event.t))
            case events.WorkerFailed():
                self._add_failure(event)
            case events.Ended():
                self._flush(operations)
                operations.append(Ended(event.status, event.t))
                self._ended = True
            case events.Unknown():
                self.notes.append(f"an event of the unknown kind {event.name!r} was left out")

    def _clear(self) -> None:
        self._points: list[Point] = []
        self._new_params: dict[str, str] = {}
        self._tags: dict[str, str] = {}

    def _flush(self, operations: list[Operation]) -> None:
        if self._new_params:
            operations.append(Params(self._new_params, self._told))
        if self._tags:
            operations.append(Tags(self._tags, self._told))
        if self._points:
            operations.append(Points(self._points))
        self._clear()

    def _start(self, operations: list[Operation], t: int) -> None:
        self._flush(operations)
        if self._ended:
            operations.append(Reopened(t))
        self._ended = self._failed = False

    def _add_params(self, event: events.ParamsSet) -> None:
        for original, value in event.values.items():
            key, value = safe_key(original), fitted(value, PARAM_LIMIT)
            if key not in self._params:
                self._params[key] = self._new_params[key] = value
            elif self._params[key] != value:
                self.notes.append(f"the parameter {original!r} keeps its first value: MLflow never changes one")

    def _add_failure(self, event: events.WorkerFailed) -> None:
        if not self._failed:  # The first worker to fail is the one to look at; others fail because of it.
            message = f"rank {event.rank} on {event.host}: {event.message}"
            self._tags[FAILURE_TAG] = fitted(message, TAG_LIMIT)
        self._failed = True

    def _fresh(self, event: events.Measured) -> list[Point]:
        step, fresh = event.step, []
        for original, value in event.values.items():
            key = safe_key(original)
            bit = 1 << self._bits.setdefault(key, len(self._bits))
            if not self._seen.get(step, 0) & bit:
                self._seen[step] = self._seen.get(step, 0) | bit
                fresh.append(Point(key, value, event.t, step))
        return fresh


def safe_key(key: str) -> str:
    """The key in MLflow's alphabet; it may not look like a path that leads elsewhere, nor be too long."""
    key = re.sub(r"[^/\w.\- :]", "_", key)
    parts = [part for part in posixpath.normpath(key).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:KEY_LIMIT].rstrip("/") or "_"


def fitted(value: str, limit: int) -> str:
    """The value as any store can hold it: no lone surrogates, no NUL, and shortened with a note if too long."""
    value = value.encode("utf-8", "replace").decode("utf-8").replace("\0", "")
    if len(value) <= limit:
        return value
    note = f" … [shortened from {len(value)} characters]"
    return value[: limit - len(note)] + note
