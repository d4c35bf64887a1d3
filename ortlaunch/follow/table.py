"""Rows of runs as a table for people."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.tables import print_in_full_width
from ortlaunch.base.text import printable
from ortlaunch.follow.rows import Row
from ortlaunch.follow.state import State

_STYLES = {
    State.RUNNING: "green",
    State.STOPPING: "green",
    State.FINISHED: "",
    State.FAILED: "red",
    State.KILLED: "yellow",
    State.UNKNOWN: "yellow",
}
_RIGHT_ALIGNED = ("nodes", "step", "tokens/s", "samples/s", "loss", "elapsed", "left")
_WRAPPED = ("name", "experiment", "why")
_LEAST_WRAPPED_WIDTH = 10
_RATE_NOTE = "tokens/s and samples/s: the median where a run has ended with one, else of the latest log step"
_REASON_LENGTH = 60


def render(rows: list[Row], console: Console) -> None:
    """Prints the runs; if the console is no terminal, nothing is coloured, wrapped or cut."""
    columns = _columns(rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    width = 0
    for title, cells in columns.items():
        wraps = title in _WRAPPED
        min_width = max(len(title), *map(len, cells))
        min_width = min(min_width, _LEAST_WRAPPED_WIDTH) if wraps else min_width
        width += min_width + 1
        justify = "right" if title in _RIGHT_ALIGNED else "left"
        table.add_column(title, justify=justify, no_wrap=not wraps, overflow="fold", min_width=min_width)  # type: ignore[arg-type]
    for row, cells_of_row in zip(rows, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*(Text(cell) for cell in cells_of_row), style=_STYLES.get(row.state, "cyan"))
    if console.is_terminal and width <= console.width:
        console.print(table)
    else:
        print_in_full_width(table, console)


def _columns(rows: list[Row]) -> dict[str, list[str]]:
    """Returns the columns for which some run has a value."""
    rates = [row.rates for row in rows]
    columns = {
        "id": [row.run_id for row in rows],
        "name": [row.name for row in rows],
        "experiment": [row.experiment for row in rows],
        "job": [row.job_id or "" for row in rows],
        "state": [row.state.value for row in rows],
        "nodes": [str(row.nodes) for row in rows],
        "step": [_step(row) for row in rows],
        "tokens/s": [rate_text(tokens) for tokens, _ in rates],
        "samples/s": ["" if tokens is not None else rate_text(samples) for tokens, samples in rates],
        "loss": ["" if row.last_loss is None else f"{row.last_loss:.4g}" for row in rows],
        "elapsed": [duration_text(row.elapsed_seconds) for row in rows],
        "left": [duration_text(row.left_seconds) for row in rows],
        "why": [_shortened(without_secrets(row.reason)) for row in rows],
    }
    always = ("id", "name", "state", "step", "tokens/s", "loss", "elapsed")
    shown = {title: [printable(cell) for cell in cells] for title, cells in columns.items()}
    return {title: cells for title, cells in shown.items() if title in always or _tells_something(title, cells)}


def _step(row: Row) -> str:
    # Nobody knows the steps of a script.
    return "" if not row.step and row.steps is None else f"{row.step or 0}/{row.steps or '?'}"


def _tells_something(title: str, cells: list[str]) -> bool:
    """Returns whether a column has values that a reader does not expect anyway."""
    if title == "experiment":
        return len(set(cells)) > 1
    if title == "nodes":
        return set(cells) != {"1"}
    return any(cells)


def _shortened(text: str) -> str:
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


def rate_note(rows: list[Row]) -> str:
    """Returns a note on which rates are medians; empty if all of them are, or none."""
    kinds = {row.has_median for row in rows if any(rate is not None for rate in row.rates)}
    return "" if len(kinds) < 2 else _RATE_NOTE


def rate_text(value: float | None) -> str:
    """Returns a rate as text with its significant digits."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration_text(seconds: float | None) -> str:
    """Returns a length of time in its two largest units: ``3d04h``, ``2h07m``, ``4m05s``, ``12s``."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole}s"
