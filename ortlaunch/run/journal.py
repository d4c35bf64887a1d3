"""The journal of a run: ``journal.jsonl`` in the run folder. Lines of JSON are appended and never changed.

The launcher and the first worker write it, and on a cluster the batch script too. The relay sends it to the trackers.
It is the only source for the history of a run: all that is shown elsewhere can be made again from it. This module
needs only the standard library.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from ortlaunch.base.files import PRIVATE
from ortlaunch.base.reading import notice, open_plain
from ortlaunch.base.secrets import hidden, is_hidden, without_secrets
from ortlaunch.run import events
from ortlaunch.run.events import Event, Status

_LOG = logging.getLogger(__name__)
_MOST_KEPT = 100_000
"""Events that a patient journal keeps in memory, about 50 MB; beyond that the oldest are dropped."""
_LONGEST_LINE = 16 << 20
"""The longest line that may be an event, in bytes."""


class Journal:
    """Appends events to a run's journal.

    Several processes may write the same file, because each line is one append. If a process died in the middle of a
    line, the next writer starts a new line, so that only the unfinished line is lost. A full disk raises OSError,
    unless the journal is patient.

    No secret gets into the journal, and so none gets to the trackers. If one was removed, the file is for its owner
    alone.
    """

    def __init__(self, path: Path, *, is_patient: bool = False) -> None:
        """Opens the journal for appending and creates it if it is missing. Its folder must exist.

        Args:
            path: the journal.
            is_patient: events that cannot be written are kept in memory, and written in order before the next event.
                A training goes on in this way while its disk is full.
        """
        self.path = path
        self.problem = ""
        """Why some events of a patient journal are not written; empty once all are."""
        self._is_patient = is_patient
        self._kept: deque[Event] = deque(maxlen=_MOST_KEPT)
        self._torn: tuple[int, bytes] | None = None
        """The journal's size after a line was written only in part, and the rest of the line."""
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    @property
    def unwritten(self) -> tuple[Event, ...]:
        """The events that a patient journal could not write yet."""
        return tuple(self._kept)

    @property
    def unwritten_end(self) -> tuple[Status, int] | None:
        """How and when (in milliseconds) the run has ended, if a patient journal could not write this."""
        return next(((event.status, event.t) for event in self.unwritten if isinstance(event, events.Ended)), None)

    def start(self, experiment: str, name: str, run_id: str) -> None:
        """Journals that an attempt begins. `run_id` is ortlaunch's short id, the same for all attempts of the run."""
        self._append(events.Started(_now(), experiment, name, run_id))

    def params(self, values: Mapping[str, Any]) -> None:
        """Journals the configuration, with dotted keys and with values as the user would type them."""
        self._append(events.ParamsSet(_now(), flatten(hidden("", values))))

    def tags(self, values: Mapping[str, str]) -> None:
        """Journals facts about the run, which a later attempt may change."""
        self._append(events.Tagged(_now(), {key: str(value) for key, value in values.items()}))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Journals figures of an optimizer step."""
        self._append(events.Measured(_now(), int(step), {key: float(value) for key, value in values.items()}))

    def rewind(self, step: int, reason: str) -> None:
        """Journals that training continues after `step`. `reason` says from which checkpoint and why.

        Steps beyond it that the journal has are journalled again. A reader keeps the first value of each metric and
        step, but of goodput and start-up those of every attempt.
        """
        self._append(events.Rewound(_now(), int(step), reason))

    def requeue(self, reason: str, attempts: int) -> None:
        """Journals that the workers ended and will be started again: `attempts` are over, and `reason` says why."""
        self._append(events.Requeued(_now(), reason, int(attempts)))

    def artifact(self, path: Path, artifact_path: str = "") -> None:
        """Journals a file or folder to keep with the run. `artifact_path` is its folder among the run's artifacts."""
        folder = self.path.parent.resolve()
        full = (folder / path).resolve()
        # The path is relative to the run folder where possible, because the folder may be moved before it is sent.
        shown = full.relative_to(folder) if full.is_relative_to(folder) else full
        self._append(events.FileKept(_now(), str(shown), artifact_path))

    def dataset(self, name: str, digest: str, source: str) -> None:
        """Journals the data set: its name, a short digest of its contents, and where it comes from."""
        self._append(events.DatasetUsed(_now(), name, digest, source))

    def failure(self, rank: int, host: str, message: str) -> None:
        """Journals that a worker failed."""
        self._append(events.WorkerFailed(_now(), int(rank), host, message))

    def end(self, status: Status, at: int | None = None) -> None:
        """Journals that the attempt is over. `at` is its end in milliseconds if that was earlier than now."""
        self._append(events.Ended(at or _now(), status))
        with suppress(OSError) if self._is_patient else nullcontext():
            os.fsync(self._fd)

    def take(self, event: Event) -> None:
        """Journals an event that another journal has."""
        self._append(event)

    def close(self) -> None:
        """Closes the file. The journal takes no events afterwards."""
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, event: Event) -> None:
        if not self._is_patient:
            self._write(event)
            return
        if len(self._kept) == _MOST_KEPT:
            self._torn = None  # The oldest event, of which a part may be written, is dropped.
        self._kept.append(event)
        try:
            while self._kept:
                self._write(self._kept[0])
                self._kept.popleft()
        except OSError as error:
            self.problem = error.strerror or str(error)
        else:
            self.problem = ""

    def _write(self, event: Event) -> None:
        size = os.fstat(self._fd).st_size
        if self._torn is not None and self._torn[0] == size:
            data = self._torn[1]  # Nobody has written since a full disk took only a part of this line.
        else:
            line = events.encode(_without_secrets(event))
            if is_hidden(line):
                os.fchmod(self._fd, PRIVATE)
            data = (("" if self._at_line_start(size) else "\n") + line).encode()
        written = 0
        try:
            while written < len(data):  # One write is enough in practice. After a short one the next raises the reason.
                written += os.write(self._fd, data[written:])
        except OSError:
            if self._is_patient:
                self._torn = (size + written, data[written:])
            raise
        self._torn = None

    def _at_line_start(self, size: int) -> bool:
        return size == 0 or os.pread(self._fd, 1, size - 1) == b"\n"


def _without_secrets(event: Event) -> Event:
    """The event without secrets in its texts. Figures hold none, and a file's path must stay the path."""
    if isinstance(event, events.Measured | events.FileKept):
        return event
    public: dict[str, Any] = {}
    for one in fields(event):
        value = getattr(event, one.name)
        if isinstance(value, str):
            public[one.name] = without_secrets(value)
        elif isinstance(value, dict):
            public[one.name] = {key: without_secrets(text) for key, text in value.items()}
    return replace(event, **public)


def _now() -> int:
    return time.time_ns() // 1_000_000


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested mappings to dotted keys and texts: ``{"a": {"b": None}}`` becomes ``{"a.b": "null"}``."""
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
        return without_secrets(value)
    if isinstance(value, (bool, list, tuple, Mapping)) or value is None:
        return json.dumps(value, default=str)
    return str(value)


@dataclass
class Chunk:
    """Some complete lines of a journal."""

    events: list[Event]
    offset: int
    """The byte where the next line begins."""
    corrupt: list[int] = field(default_factory=list)
    """The bytes where lines begin that could not be parsed."""


def read_chunk(path: Path, offset: int, limit: int | None = None) -> Chunk:
    """Reads complete lines from `offset` on.

    Args:
        path: the journal. A missing file counts as an empty one.
        offset: the byte where a line begins.
        limit: stop after the first line that ends this many bytes or more after the offset; None reads all lines.
    """
    chunk = Chunk([], offset)
    try:
        file = open_plain(path)
    except FileNotFoundError:
        return chunk
    with file:
        file.seek(offset)
        for line in _lines(file, path):
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

    A last line without a newline is left for the next call. Lines that cannot be parsed are skipped, with one warning.

    Returns:
        The events, and the offset for the next call.
    """
    chunk = read_chunk(path, offset)
    if len(chunk.corrupt) == 1:
        _LOG.warning("%s: skipped a line that is no journal event, at byte %d", path, chunk.corrupt[0])
    elif chunk.corrupt:
        what = "%s: skipped %d lines that are no journal events, the first at byte %d"
        _LOG.warning(what, path, len(chunk.corrupt), chunk.corrupt[0])
    return chunk.events, chunk.offset


def iterate(path: Path) -> Iterator[Event]:
    """Yields all events of a journal.

    Raises:
        OSError: there is no journal.
    """
    with open_plain(path) as file:
        for line in _lines(file, path):
            if line.endswith(b"\n") and (event := events.decode(line)) is not None:
                yield event


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a journal. It ends before a line that is too long for an event, which a damaged file may have."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            notice(path, f"it has a line of more than {_LONGEST_LINE:,} bytes")
            return
        yield line


def decoded_lines(data: bytes) -> list[Event]:
    """The events in some complete lines. Lines that hold no event are left out."""
    return [event for line in data.split(b"\n") if line.strip() and (event := events.decode(line)) is not None]
