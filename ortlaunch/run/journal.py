"""The journal of a run: ``journal.jsonl`` in the run folder, one JSON object per line, appended and never changed.

The launcher and the first worker write it, on a cluster the batch script too; the relay sends it to MLflow. It is the
truth about a run: what is not in it did not happen, and all that is shown elsewhere can be made again from it. Needs
the standard library alone.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ortlaunch.base.secrets import redacted
from ortlaunch.run import events
from ortlaunch.run.events import Event, Status

_LOG = logging.getLogger(__name__)


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
        self._append(events.Started(_now(), experiment, name, run_id))

    def params(self, values: Mapping[str, Any]) -> None:
        """The configuration; nested keys are joined by dots and values are written as the user would type them."""
        self._append(events.ParamsSet(_now(), flatten(values)))

    def tags(self, values: Mapping[str, str]) -> None:
        """Facts about the run, which a later attempt may change."""
        self._append(events.Tagged(_now(), {key: str(value) for key, value in values.items()}))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of an optimizer step."""
        self._append(events.Measured(_now(), int(step), {key: float(value) for key, value in values.items()}))

    def rewind(self, step: int, reason: str) -> None:
        """Training goes on after `step`, whatever was journalled beyond it; `reason` says from where and why.

        Later steps are journalled again. What reads a journal keeps the first value of each metric and step.
        """
        self._append(events.Rewound(_now(), int(step), reason))

    def requeue(self, reason: str, attempts: int) -> None:
        """The workers have ended and will be started again, the `attempts`-th time being over; `reason` says why."""
        self._append(events.Requeued(_now(), reason, int(attempts)))

    def artifact(self, path: Path, artifact_path: str = "") -> None:
        """A file or folder to keep with the run; `artifact_path` is the folder it goes to there."""
        folder = self.path.parent.resolve()
        full = (folder / path).resolve()
        # Relative to the run folder where possible: the folder may have moved before it is sent.
        shown = full.relative_to(folder) if full.is_relative_to(folder) else full
        self._append(events.FileKept(_now(), str(shown), artifact_path))

    def dataset(self, name: str, digest: str, source: str) -> None:
        """What the run trains on: a name, a short digest of its contents, and where it is from."""
        self._append(events.DatasetUsed(_now(), name, digest, source))

    def failure(self, rank: int, host: str, message: str) -> None:
        """A worker failed."""
        self._append(events.WorkerFailed(_now(), int(rank), host, message))

    def end(self, status: Status, at: int | None = None) -> None:
        """The attempt is over; `at` gives the true end in milliseconds where it is known to be earlier than now."""
        self._append(events.Ended(at or _now(), status))
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; the journal takes no more events."""
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, event: Event) -> None:
        data = memoryview((("" if self._at_line_start() else "\n") + events.encode(event)).encode())
        while data:  # One write in practice; a second one after a short write gets to say why (ENOSPC).
            data = data[os.write(self._fd, data) :]

    def _at_line_start(self) -> bool:
        size = os.fstat(self._fd).st_size
        return size == 0 or os.pread(self._fd, 1, size - 1) == b"\n"


def _now() -> int:
    return time.time_ns() // 1_000_000


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
            event = events.decode(line) if line.strip() else None
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


def iterate(path: Path) -> Iterator[Event]:
    """All events of a journal, one at a time.

    Raises:
        OSError: there is no journal.
    """
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (event := events.decode(line)) is not None:
                yield event


def decoded_lines(data: bytes) -> list[Event]:
    """The events of some complete lines; what is none is left out."""
    return [event for line in data.split(b"\n") if line.strip() and (event := events.decode(line)) is not None]
