"""The journal: what happened in a run, one JSON object per line, written by the run itself.

It is the truth about a run; MLflow gets it from here. Writing needs the standard library alone and waits for nobody.
Every line holds `event` (its kind) and `t` (wall-clock milliseconds, fixed when the line is written, so that sending a
line twice makes no second point).
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from ortlaunch.base.secrets import redacted

Event = dict[str, Any]
Status = Literal["FINISHED", "FAILED", "KILLED"]

_LOG = logging.getLogger(__name__)
_LARGEST_STEP = 2**63


class Journal:
    """Appends events to a run's journal.

    Several processes may write the same file: each line is one append. After a process died within a line, the next
    writer starts a new one, so that at most the unfinished line is lost. A full disk raises OSError.
    """

    def __init__(self, path: Path) -> None:
        """Opens the journal for appending and creates it if need be; its folder must exist."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def start(self, experiment: str, name: str, run_id: str) -> None:
        """An attempt begins; `run_id` is ortlaunch's own short id, the same for all attempts of the run."""
        self._append("start", experiment=experiment, name=name, run_id=run_id)

    def params(self, values: Mapping[str, Any]) -> None:
        """The configuration; nested keys are joined by dots and values are written as the user would type them."""
        self._append("params", values=flatten(values))

    def tags(self, values: Mapping[str, str]) -> None:
        """Facts about the run, which a later attempt may change."""
        self._append("tags", values={key: str(value) for key, value in values.items()})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of an optimizer step."""
        self._append("metrics", step=int(step), values={key: _encoded(float(value)) for key, value in values.items()})

    def rewind(self, step: int, reason: str) -> None:
        """Training goes on after `step`, whatever was journalled beyond it; `reason` says from where and why.

        Later steps are journalled again. What reads a journal keeps the first value of each metric and step.
        """
        self._append("rewind", step=int(step), reason=reason)

    def requeue(self, reason: str, attempts: int) -> None:
        """The workers have ended and will be started again, the `attempts`-th time being over; `reason` says why."""
        self._append("requeue", reason=reason, attempts=int(attempts))

    def artifact(self, path: Path, artifact_path: str = "") -> None:
        """A file or folder to keep with the run; `artifact_path` is the folder it goes to there."""
        folder = self.path.parent.resolve()
        full = (folder / path).resolve()
        # Relative to the run folder where possible: the folder may have moved before it is sent.
        shown = full.relative_to(folder) if full.is_relative_to(folder) else full
        self._append("artifact", path=str(shown), artifact_path=artifact_path)

    def dataset(self, name: str, digest: str, source: str) -> None:
        """What the run trains on: a name, a short digest of its contents, and where it is from."""
        self._append("dataset", name=name, digest=digest, source=source)

    def failure(self, rank: int, host: str, message: str) -> None:
        """A worker failed."""
        self._append("failure", rank=int(rank), host=host, message=message)

    def end(self, status: Status, at: int | None = None) -> None:
        """The attempt is over; `at` gives the true end in milliseconds where it is known to be earlier than now."""
        self._append("end", t=at, status=status)
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; the journal takes no more events."""
        os.close(self._fd)

    def _append(self, event: str, t: int | None = None, **fields: Any) -> None:
        line = json.dumps({"event": event, "t": t or time.time_ns() // 1_000_000, **fields}, allow_nan=False) + "\n"
        data = memoryview((("" if self._at_line_start() else "\n") + line).encode())
        while data:  # One write in practice; a second one after a short write gets to say why (ENOSPC).
            data = data[os.write(self._fd, data) :]

    def _at_line_start(self) -> bool:
        size = os.fstat(self._fd).st_size
        return size == 0 or os.pread(self._fd, 1, size - 1) == b"\n"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as one level of dotted keys and texts: ``{"a": {"b": None}}`` is ``{"a.b": "null"}``."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = _text(value)
    return flat


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return redacted(value) if "@" in value else value
    if isinstance(value, (bool, list, tuple, Mapping)) or value is None:
        return json.dumps(value, default=str)
    return str(value)


def _encoded(value: float) -> float | str:
    """JSON has no word for NaN and infinity; they travel as text."""
    return value if math.isfinite(value) else str(value)


@dataclass
class Chunk:
    """Some complete lines of a journal."""

    events: list[Event]
    offset: int
    """Where the next line begins, in bytes."""
    corrupt: list[int] = field(default_factory=list)
    """Where lines began that could not be understood."""


def read_chunk(path: Path, offset: int, limit: int | None = None) -> Chunk:
    """Reads complete lines from `offset` on.

    Args:
        path: The journal; a missing file is an empty one.
        offset: Byte where a line begins.
        limit: Stop after the first line that ends this many bytes or more behind the offset; None reads all.
    """
    chunk = Chunk([], offset)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return chunk
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            event = decoded(line) if line.strip() else None
            if event is not None:
                chunk.events.append(event)
            elif line.strip():
                chunk.corrupt.append(chunk.offset)
            chunk.offset += len(line)
            if limit is not None and chunk.offset - offset >= limit:
                break
    return chunk


def read_events(path: Path, offset: int) -> tuple[list[Event], int]:
    """Reads all complete lines from byte `offset` on.

    A last line without its end is left for later; a line that cannot be understood is skipped and logged.

    Returns:
        The events, and the offset to go on from.
    """
    chunk = read_chunk(path, offset)
    for position in chunk.corrupt:
        _LOG.warning("%s: skipped a line that is no journal event, at byte %d", path, position)
    return chunk.events, chunk.offset


def decoded(line: bytes) -> Event | None:
    """The event of a line, with its metrics as floats; None if it is not one."""
    try:
        event = json.loads(line)
        if type(event["t"]) is not int or not isinstance(event["event"], str):
            return None
        shape = _SHAPES.get(event["event"])
        return event if shape is None or shape(event) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _texts(*names: str) -> Callable[[Event], bool]:
    return lambda event: all(isinstance(event[name], str) for name in names)


def _has_texts(event: Event) -> bool:
    return all(isinstance(value, str) for value in event["values"].values())


def _has_points(event: Event) -> bool:
    event["values"] = {key: float(value) for key, value in event["values"].items()}
    return type(event["step"]) is int and -_LARGEST_STEP <= event["step"] < _LARGEST_STEP


_SHAPES: dict[str, Callable[[Event], bool]] = {
    "start": _texts("experiment", "name", "run_id"),
    "params": _has_texts,
    "tags": _has_texts,
    "metrics": _has_points,
    "rewind": lambda event: type(event["step"]) is int and event["step"] >= 0 and _texts("reason")(event),
    "requeue": lambda event: type(event["attempts"]) is int and _texts("reason")(event),
    "artifact": _texts("path", "artifact_path"),
    "dataset": _texts("name", "digest", "source"),
    "failure": lambda event: type(event["rank"]) is int and _texts("host", "message")(event),
    "end": lambda event: event["status"] in ("FINISHED", "FAILED", "KILLED"),
}
