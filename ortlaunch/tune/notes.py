"""The notes of a tuning: each outcome as a line of JSON, written when it is known.

The schedule is a function of these outcomes. After a kill, the same command reads them and asks for the same trials in
the same order, so that it goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words, parse_json, read_text
from ortlaunch.launch.trial import Outcome, Status
from ortlaunch.tune.cell import Cell, Effort

_AGAIN = 2.0
"""A trial that did not end in its time is made again when it may take this many times as long."""
_OUTCOME = asdict(Outcome("ok", 0.0))
"""A value of each field's type."""


class Notes:
    """The outcomes in a file, by what was tried."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file. What it holds already is read; a last line that a kill has cut off counts for nothing.

        Raises:
            RequestError: something is there that cannot be read.
        """
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        try:
            text = read_text(path)
        except FileNotFoundError:
            text = ""
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {in_words(error)}: move it away, or use --again") from error
        for line in text.splitlines():
            try:
                stored = parse_json(line)
                if isinstance(stored["value"], dict):
                    self._found[str(stored["key"])] = stored["value"]
            except (ValueError, KeyError, TypeError):
                continue
        self._is_torn = bool(text) and not text.endswith("\n")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was noted under a key. Whoever asks looks at it: another version may have noted other values."""
        return self._found.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Notes a value, on the disk when this returns."""
        self._found[key] = value
        line = json.dumps({"key": key, "value": value}) + "\n"
        with self._path.open("a") as file:
            file.write(f"\n{line}" if self._is_torn else line)
            file.flush()
            os.fsync(file.fileno())
        self._is_torn = False

    def remembered(self, trial: Callable[[Cell, Effort], Outcome]) -> Callable[[Cell, Effort], Outcome]:
        """The same trial function, which takes an outcome from the notes if there is one.

        A failure of the machine is not noted, nor is a trial that did not end in time while other processes had most of
        the cores: when the search goes on, they are tried again. Another one that did not end in time is made again
        where it may now take several times as long, as with more minutes.
        """

        def run(cell: Cell, effort: Effort) -> Outcome:
            key = f"{effort.stage} {effort.number} {cell}"
            noted = _outcome(self.get(key))
            if noted is not None and not (noted.status == "time-out" and effort.timeout >= _AGAIN * noted.seconds):
                return noted
            outcome = trial(cell, effort)
            if not outcome.is_of_machine and not outcome.is_late_by_others:
                self.put(key, outcome.to_json())
            return outcome

        return run


def _outcome(stored: dict[str, Any] | None) -> Outcome | None:
    """A noted outcome; None if there is none, or one that another version of ortlaunch has noted otherwise."""
    known = {name: value for name, value in (stored or {}).items() if name in _OUTCOME}
    if not {"status", "seconds"} <= known.keys() or known["status"] not in get_args(Status):
        return None
    if not all(_is_like(value, _OUTCOME[name]) for name, value in known.items()):
        return None
    if known["status"] == "ok" and not known.get("rate", 0.0) > 0:
        return None
    return Outcome(**known | {"is_noted": True})


def _is_like(value: Any, other: Any) -> bool:
    """Whether a value has the type of another; where a float is expected, also a whole number."""
    return type(value) is type(other) or (type(other) is float and type(value) is int)
