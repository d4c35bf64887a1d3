"""What all tables on the terminal have in common: no name in them steers the terminal, no line ends early in a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_NO_LIMIT = 100_000


def printable(text: str) -> str:
    """Names come from a shared server: none may steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def print_in_full_width(table: Table, console: Console) -> None:
    """Lets no line end early: what reads a pipe has no width, and a narrow terminal wraps by itself."""
    unlimited = console.options.update(width=_NO_LIMIT)
    width = Measurement.get(console, unlimited, table).maximum
    for segments in console.render_lines(table, unlimited.update(width=width), pad=False):
        console.out("".join(segment.text for segment in segments).rstrip(), highlight=False)
