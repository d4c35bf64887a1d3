"""Prints tables: a pipe gets every line in full width."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_NO_LIMIT = 100_000


def print_in_full_width(table: Table, console: Console, most: int = _NO_LIMIT) -> None:
    """Prints a table without cutting its lines: a pipe has no width, and a narrow terminal wraps lines itself.

    Args:
        table: the table.
        console: where to.
        most: characters of a line, from which on columns that fold do so.
    """
    unlimited = console.options.update(width=_NO_LIMIT)
    width = min(most, Measurement.get(console, unlimited, table).maximum)
    for segments in console.render_lines(table, unlimited.update(width=width), pad=False):
        console.out("".join(segment.text for segment in segments).rstrip(), highlight=False)
