"""Collects torch's warnings during a trace: statements that depend on a tensor's value."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import torch

from ortlaunch.ort.source import OUR_FOLDER, SourceLine, asking_place, location, statement_at


@dataclass(frozen=True)
class TraceWarning:
    """One TracerWarning."""

    place: SourceLine
    message: str
    """First sentence."""

    @property
    def location(self) -> str:
        """``file:line``, relative to the current folder if the file is in it."""
        return location(self.place)

    @property
    def statement(self) -> str:
        """The source statement."""
        return statement_at(*self.place)


@contextlib.contextmanager
def trace_warnings() -> Iterator[list[TraceWarning]]:
    """Collects TracerWarnings, each place once; all warnings are then passed on as usual."""
    found: list[TraceWarning] = []
    caught: list[tuple[Warning | str, type[Warning], SourceLine]] = []

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        # When one of our function modes passes a call on, torch reports the mode's line instead of the model's.
        place = asking_place() if filename.startswith(OUR_FOLDER) else (filename, lineno)
        caught.append((message, category, place))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            yield found
    finally:
        kinds: dict[tuple[SourceLine, str], None] = {}
        for message, category, place in caught:
            if issubclass(category, torch.jit.TracerWarning):  # type: ignore[attr-defined]
                kinds.setdefault((place, str(message).strip().partition(". ")[0]))
            warnings.warn_explicit(message, category, *place)
        found.extend(TraceWarning(place, text) for place, text in kinds)
