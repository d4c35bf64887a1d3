"""The events of a run's journal. Each kind is a dataclass, and each event becomes one line of JSON.

A line is ``{"event": KIND, "t": MILLISECONDS, …fields}``. A reader skips kinds that it does not know, so that a newer
release can add kinds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeGuard, get_args, get_type_hints

Status = Literal["FINISHED", "FAILED", "KILLED"]

LOSS = "train/loss"
"""The metric that every log step has."""
_LARGEST_STEP = 2**63
_LATEST = 253_402_300_800_000
"""The year 10000 in milliseconds since the epoch, which is the end of Python's calendar."""


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    kind: ClassVar[str] = ""
    t: int
    """The time of the event in milliseconds since the epoch."""


@dataclass(frozen=True)
class Started(Event):
    """An attempt begins."""

    kind: ClassVar[str] = "start"
    experiment: str
    name: str
    run_id: str
    """ortlaunch's own short id, the same for all attempts of the run."""


@dataclass(frozen=True)
class ParamsSet(Event):
    """The configuration, as dotted keys and texts."""

    kind: ClassVar[str] = "params"
    values: dict[str, str]


@dataclass(frozen=True)
class Tagged(Event):
    """Facts about the run, which a later attempt may change."""

    kind: ClassVar[str] = "tags"
    values: dict[str, str]


@dataclass(frozen=True)
class Measured(Event):
    """Figures of an optimizer step."""

    kind: ClassVar[str] = "metrics"
    step: int
    values: dict[str, float]

    @property
    def is_log_step(self) -> bool:
        """Whether these are the figures of a training step, not those of an evaluation or a summary."""
        return LOSS in self.values


@dataclass(frozen=True)
class Rewound(Event):
    """Training continues after `step`. The steps that the journal has beyond it will be repeated."""

    kind: ClassVar[str] = "rewind"
    step: int
    reason: str


@dataclass(frozen=True)
class Requeued(Event):
    """The workers have ended and will be started again."""

    kind: ClassVar[str] = "requeue"
    reason: str
    attempts: int
    """How many attempts are over."""


@dataclass(frozen=True)
class FileKept(Event):
    """A file or folder to keep with the run."""

    kind: ClassVar[str] = "artifact"
    path: str
    """Relative to the run folder, or absolute for a path outside it."""
    artifact_path: str


@dataclass(frozen=True)
class DatasetUsed(Event):
    """The data set that the run trains on."""

    kind: ClassVar[str] = "dataset"
    name: str
    digest: str
    source: str


@dataclass(frozen=True)
class WorkerFailed(Event):
    """A worker failed."""

    kind: ClassVar[str] = "failure"
    rank: int
    host: str
    message: str


@dataclass(frozen=True)
class Ended(Event):
    """The attempt is over."""

    kind: ClassVar[str] = "end"
    status: Status


@dataclass(frozen=True)
class Unknown(Event):
    """An event of a kind that this release does not know."""

    name: str


_KINDS: dict[str, type[Event]] = {
    one.kind: one
    for one in (
        *(Started, ParamsSet, Tagged, Measured, Rewound, Requeued),
        *(FileKept, DatasetUsed, WorkerFailed, Ended),
    )
}


def as_dict(event: Event) -> dict[str, Any]:
    """The event as the dictionary that its JSON line holds, but with metrics as floats."""
    if isinstance(event, Unknown):
        return {"event": event.name, "t": event.t}
    return {"event": event.kind} | {field.name: getattr(event, field.name) for field in fields(event)}


def encode(event: Event) -> str:
    """The event as a line of the journal, with the newline."""
    values = as_dict(event)
    if isinstance(event, Measured):
        values["values"] = {key: _encoded(value) for key, value in event.values.items()}
    return json.dumps(values, allow_nan=False) + "\n"


def decode(line: bytes) -> Event | None:
    """The event in a line of the journal; None if the line holds no event."""
    try:
        stored = json.loads(line)
        kind, t = stored["event"], stored["t"]
        if type(t) is not int or not 0 <= t < _LATEST or not isinstance(kind, str):
            return None
        cls = _KINDS.get(kind)
        if cls is None:
            return Unknown(t, kind)
        checks = _FIELD_CHECKS[cls]
        values = {name: stored[name] for name in checks}
        if not all(is_valid(values[name]) for name, is_valid in checks.items()):
            return None
        if cls is Measured:
            values["values"] = {key: float(value) for key, value in values["values"].items()}
        event = cls(**values)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
    return None if isinstance(event, Rewound) and event.step < 0 else event


def _encoded(value: float) -> float | str:
    """The value as JSON can hold it: NaN and infinity, which JSON lacks, become texts."""
    return value if math.isfinite(value) else str(value)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer that every store accepts as a step."""
    return type(value) is int and -_LARGEST_STEP <= value < _LARGEST_STEP


def _holds(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(one, kind) for one in value.values())


_TYPE_CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: is_count,
    str: lambda value: isinstance(value, str),
    Status: lambda value: value in get_args(Status),
    dict[str, str]: _holds(str),
    # NaN and infinity are stored as texts, which `float` parses.
    dict[str, float]: lambda value: isinstance(value, Mapping),
}
"""Checks of a stored value, by the type of its field."""


def _checks_of(cls: type[Event]) -> dict[str, Callable[[Any], bool]]:
    types = get_type_hints(cls)
    return {field.name: _TYPE_CHECKS[types[field.name]] for field in fields(cls)}


_FIELD_CHECKS = {cls: _checks_of(cls) for cls in _KINDS.values()}
"""The checks of an event's fields, by their names. A type without a check fails here."""
