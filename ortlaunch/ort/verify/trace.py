"""Collects torch's warnings during a trace: statements that depend on a tensor's value."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from ortlaunch.ort.verify.reference import OUR_FOLDER, TORCH_FOLDER, SourceLine, asking_place

_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): ")


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


def place_in_stack(stack: str) -> SourceLine | None:
    """Returns the innermost line of the model's own source in an exported node's stack, or the innermost of all."""
    frames = [match for match in map(_FRAME.match, stack.splitlines()) if match]
    own = [frame for frame in frames if not frame["file"].startswith((TORCH_FOLDER, OUR_FOLDER))]
    chosen = next(iter(own or frames), None)
    return (chosen["file"], int(chosen["line"])) if chosen else None


def location(place: SourceLine) -> str:
    """Returns a place as ``file:line``."""
    path = Path(place[0])
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{place[1]}"


def statement_at(filename: str, line: int) -> str:
    """Returns the statement on this line of a source file, on one line; of a compound statement only its head."""
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
