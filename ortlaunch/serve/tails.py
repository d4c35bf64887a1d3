"""Files that grow while a run goes on, read piece by piece. A piece begins and ends at a line's beginning.

A file's position is a byte offset. So what comes after a position is always the same text, whoever asks, and a browser
that was cut off goes on exactly where it was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.run.events import Ended, Event, Measured, Rewound
from ortlaunch.run.journal import decoded_lines
from ortlaunch.run.run import Run
from ortlaunch.serve.follow.beneath import identity, open_beneath
from ortlaunch.serve.follow.curves import MetricNames
from ortlaunch.serve.follow.logs import read_after, shown, whole_lines

PIECE_BYTES = 256 * 1024
"""The largest piece. The text of an event has some more, for its quotes and line breaks."""


@dataclass(frozen=True)
class Piece:
    """What a file has after a position."""

    content: dict[str, Any] | None
    """The data of the event; None if there is nothing to tell."""
    next: int
    """The position after it."""
    file: tuple[int, int] | None
    """Tells the file from another that took its place; None if there is none."""
    size: int = 0
    """The file's size."""


class FileTail:
    """One file of a run folder."""

    event = ""
    """The name of its events."""

    def __init__(self, run: Run, file: Path, facts: dict[str, Any]) -> None:
        """
        Args:
            run: the run.
            file: the file, relative to the run folder.
            facts: what each event says beside its content.
        """
        self._run = run
        self._file = file
        self._facts = facts

    def read(self, position: int, until: int | None = None) -> Piece:
        """Returns what comes after a position. It blocks.

        Args:
            position: where a piece ended before.
            until: where another piece ended, which this one does not pass; None for the file's end.
        """
        limit = PIECE_BYTES if until is None else min(PIECE_BYTES, until - position)
        try:
            with open_beneath(self._run.path, self._file) as file:
                size = os.fstat(file.fileno()).st_size
                before, data = read_after(file, position, limit) if size > position else (b"", b"")
                found = identity(file)
        except OSError:
            return Piece(None, position, None)
        ends = until is not None and position + len(data) == until
        whole = data if ends else whole_lines(data, is_full=len(data) == PIECE_BYTES)
        following = position + len(whole)
        told = self.told(before, whole) if whole else None
        facts = self._facts | {"offset": position, "next": following}
        return Piece(None if told is None else facts | told, following, found, size)

    def end(self) -> int:
        """Returns the position of the last whole line's end. It blocks."""
        try:
            with open_beneath(self._run.path, self._file) as file:
                size = os.fstat(file.fileno()).st_size
                start = max(0, size - PIECE_BYTES)
                file.seek(start)
                return start + len(whole_lines(file.read(PIECE_BYTES), is_full=False))
        except OSError:
            return 0

    def told(self, before: bytes, lines: bytes) -> dict[str, Any] | None:
        """Returns what an event says of some whole lines, or of a piece of a line that is longer than a piece.

        Args:
            before: what the file has before them.
            lines: the lines.
        """
        raise NotImplementedError


class LogTail(FileTail):
    """A log, as text."""

    event = "log"

    def told(self, before: bytes, lines: bytes) -> dict[str, Any]:
        """Returns the lines as text; see `ortlaunch.serve.follow.logs.shown`."""
        return {"text": shown(self._run, self._file, lines, before, is_cut=not lines.endswith(b"\n"))}


class JournalTail(FileTail):
    """A journal, as new points of the run's curves."""

    event = "run"

    def told(self, before: bytes, lines: bytes) -> dict[str, Any] | None:
        """Returns the points, the step that training went back to, and how the run ended."""
        points: dict[str, list[tuple[int, float | None]]] = {}
        told: dict[str, Any] = {}
        names = MetricNames()
        for event in decoded_lines(lines):
            _take(event, names, points, told)
        return {"row": None, "points": points, **told} if points or told else None


def _take(
    event: Event, names: MetricNames, points: dict[str, list[tuple[int, float | None]]], told: dict[str, Any]
) -> None:
    match event:
        case Measured():
            told.setdefault("times", []).append((event.step, event.t / 1000))
            for name, value in event.values.items():
                # JSON has neither NaN nor infinity.
                figure = float(f"{value:.6g}") if value - value == 0 else None
                points.setdefault(names[name], []).append((event.step, figure))
        case Rewound():
            told["rewound"] = event.step
        case Ended():
            told["ended"] = event.status
