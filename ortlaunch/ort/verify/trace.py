"""What torch warns of while it traces: statements that depend on a tensor's value."""

from __future__ import annotations

import ast
import contextlib
import linecache
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from ortlaunch.ort.verify.reference import OUR_FOLDER, SourceLine, asking_place


@dataclass(frozen=True)
class TraceWarning:
    """One TracerWarning."""

    place: SourceLine
    message: str
    """First sentence."""

    @property
    def location(self) -> str:
        """``file:line``, relative to the folder of work where it lies within."""
        return location(self.place)

    @property
    def statement(self) -> str:
        """The source statement."""
        return statement_at(*self.place)


@contextlib.contextmanager
def trace_warnings() -> Iterator[list[TraceWarning]]:
    """Collects the TracerWarnings raised within, each place once; all warnings then go where they would have gone."""
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
        # Where a function mode of ours passes a call on, torch takes that line for the model's.
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


def location(place: SourceLine) -> str:
    """A place as ``file:line``."""
    path = Path(place[0])
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{place[1]}"


def statement_at(filename: str, line: int) -> str:
    """The statement of a source file that `line` belongs to, on one line; of a compound one its head only."""
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return linecache.getline(filename, line).strip()
    holding = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not holding:
        return linecache.getline(filename, line).strip()
    node = max(holding, key=lambda one: (one.lineno, -(one.end_lineno or 0)))
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body and body[0].lineno > node.lineno else node.end_lineno or node.lineno
    lines = source.splitlines()[node.lineno - 1 : max(last, node.lineno)]
    return " ".join(text.strip() for text in lines)
