"""Translates journal events to operations that MLflow accepts: with its characters and limits, and each point once."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ortlaunch.config.effects import same_numbers
from ortlaunch.run import events
from ortlaunch.run.events import Event
from ortlaunch.run.goodput import ACCOUNT
from ortlaunch.run.names import CHANGED_PARAM

PARAM_LIMIT = 6000
"""The longest parameter value that MLflow stores, in characters."""
TAG_LIMIT = 5000
"""The longest tag value that every MLflow release and database stores, in characters."""
KEY_LIMIT = 250
FAILURE_TAG = "ortlaunch.failure"


@dataclass(frozen=True)
class Point:
    """One value of a metric. `timestamp` is in milliseconds since the epoch."""

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
    """Parameters to set. A parameter never changes."""

    values: dict[str, str]
    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Tags:
    """Tags to set. Later values replace earlier ones."""

    values: dict[str, str]
    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Artifact:
    """A file or folder to upload. Its path is relative to the run folder, or absolute if it is outside it."""

    path: str
    artifact_path: str


@dataclass(frozen=True)
class Input:
    """The data set that the run trains on."""

    name: str
    digest: str
    source: str
    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Reopened:
    """A new attempt at a run that had ended."""

    t: int = field(default=0, compare=False)
    """When, in milliseconds."""


@dataclass(frozen=True)
class Ended:
    """The run is over. `t` is in milliseconds since the epoch."""

    status: str
    t: int


Operation = Points | Params | Tags | Artifact | Input | Reopened | Ended


class Translator:
    """Translates a journal's events to operations. It must get all events in order from the journal's beginning.

    It remembers the points and parameters that it has seen. A resumed run journals steps again, and MLflow would store
    them as further points. Where the attempt has changed a parameter that a training's numbers depend on, they are
    further points: those seen before are of steps that the weights do not have. A parameter that an attempt changes
    would make MLflow refuse the whole batch: its new value becomes a tag.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Messages for the log about what was left out or changed."""
        self._bits: dict[str, int] = {}
        self._seen: dict[int, int] = {}  # Maps a step to one bit per metric key, which saves memory in long runs.
        self._params: dict[str, str] = {}
        self._changed: list[str] = []
        """Parameters with which this attempt computes other numbers, until it has gone back to where it starts."""
        self._ended = False
        self._failed = False
        self._told = 0
        """The time of the last event with parameters or tags, in milliseconds."""
        self._clear()

    def translate(self, taken: Iterable[Event]) -> list[Operation]:
        """The operations for the next events. Events are merged where their order allows it."""
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
                # The run will journal these steps again. `_fresh` drops each (key, step) that was already seen.
                self.notes.append(f"training goes on after step {event.step}: {event.reason}")
                self._forget_after(event.step)
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
        self._changed = []

    def _forget_after(self, step: int) -> None:
        """Lets the points after a step be sent again if the attempt computes others."""
        stale = [one for one in self._seen if one > step]
        if self._changed and stale:
            for one in stale:
                del self._seen[one]
            steps, keys = f"{step + 1} to {max(stale)}", ", ".join(self._changed)
            self.notes.append(
                f"the steps {steps} are trained again with another {keys}: their figures are sent again, and the later "
                "ones hold"
            )
        self._changed = []

    def _add_params(self, event: events.ParamsSet) -> None:
        for original, value in event.values.items():
            key, value = safe_key(original), fitted(value, PARAM_LIMIT)
            if key not in self._params:
                self._params[key] = self._new_params[key] = value
            elif self._params[key] != value:
                self._params[key] = value
                if not same_numbers(original):
                    self._changed.append(original)
                self._tags[safe_key(CHANGED_PARAM + key)] = fitted(value, TAG_LIMIT)
                self.notes.append(
                    f"the parameter {original!r} keeps its first value, since MLflow never changes one; "
                    f"the new value is the tag {CHANGED_PARAM}{key}"
                )

    def _add_failure(self, event: events.WorkerFailed) -> None:
        if not self._failed:  # Only the first failure is kept: the other workers fail because of it.
            message = f"rank {event.rank} on {event.host}: {event.message}"
            self._tags[FAILURE_TAG] = fitted(message, TAG_LIMIT)
        self._failed = True

    def _fresh(self, event: events.Measured) -> list[Point]:
        step, fresh = event.step, []
        for original, value in event.values.items():
            key = safe_key(original)
            bit = 1 << self._bits.setdefault(key, len(self._bits))
            if _is_of_attempt(original) or not self._seen.get(step, 0) & bit:
                self._seen[step] = self._seen.get(step, 0) | bit
                fresh.append(Point(key, value, event.t, step))
        return fresh


def _is_of_attempt(key: str) -> bool:
    """Whether every attempt measures this anew, also at a step at which another has: its start, or its end."""
    return key in ACCOUNT or key.startswith("startup/")


def safe_key(key: str) -> str:
    """The key as MLflow accepts it: with allowed characters, not too long, and without path parts such as '..'."""
    key = re.sub(r"[^/\w.\- :]", "_", key)
    parts = [part for part in posixpath.normpath(key).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:KEY_LIMIT].rstrip("/") or "_"


def fitted(value: str, limit: int) -> str:
    """The value as every store accepts it: without lone surrogates and NUL, and shortened with a note if too long."""
    value = value.encode("utf-8", "replace").decode("utf-8").replace("\0", "")
    if len(value) <= limit:
        return value
    note = f" … [shortened from {len(value)} characters]"
    return value[: limit - len(note)] + note
