"""What torch warns of while it traces: statements that depend on a tensor's value."""

from __future__ import annotations

import ast
import contextlib
import linecache
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ortlaunch.ort.check.reference import Place


@dataclass(frozen=True)
class TraceWarning:
    """One TracerWarning."""

    place: Place
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
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        kinds: dict[tuple[Place, str], None] = {}
        for warning in caught:
            if issubclass(warning.category, torch.jit.TracerWarning):  # type: ignore[attr-defined]
                message = str(warning.message).strip().partition(". ")[0]
                kinds.setdefault(((warning.filename, warning.lineno), message))
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        found.extend(TraceWarning(place, message) for place, message in kinds)


def location(place: Place) -> str:
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
