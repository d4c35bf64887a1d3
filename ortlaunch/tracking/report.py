"""A comparison as a table for people, or as text for programs and pages."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ortlaunch.tracking.compare import Comparison, Row

_MISSING = "-"
_MARK = "!"
_NO_LIMIT = 100_000
_FOLDED_WIDTH = 10


@dataclass(frozen=True)
class _Column:
    title: str
    values: list[str]
    numeric: bool = False
    folds: bool = False
    """A terminal that is too narrow may break these values over lines."""

    @property
    def least_width(self) -> int:
        width = max(cell_len(text) for text in (*self.title.split("\n"), *self.values))
        return min(width, _FOLDED_WIDTH) if self.folds else width


def render(comparison: Comparison, format: str, console: Console) -> None:
    """Prints a comparison.

    Args:
        comparison: What to print.
        format: table, json, csv or markdown. json has the exact medians behind each speed-up.
        console: Where to print; if it is no terminal, nothing is coloured, wrapped or cut.
    """
    if format == "table":
        _print_table(comparison, console)
    else:
        text = {"json": _json, "csv": _csv, "markdown": _markdown}[format](comparison)
        console.out(text, end="", highlight=False)


def _print_table(comparison: Comparison, console: Console) -> None:
    columns = _columns(comparison)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.numeric else "left",
            no_wrap=not column.folds,
            overflow="fold",
            min_width=column.least_width,
        )
    for row, cells in zip(comparison.rows, _cells(columns), strict=True):
        style = "yellow" if row.suspect or row.status != "FINISHED" else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    if console.is_terminal and sum(column.least_width + 1 for column in columns) <= console.width:
        console.print(table)
    else:
        print_in_full_width(table, console)
    for line in _footnotes(comparison):
        console.print(Text(line), soft_wrap=not console.is_terminal)


def print_in_full_width(table: Table, console: Console) -> None:
    """Lets no line end early: what reads a pipe has no width, and a narrow terminal wraps by itself."""
    unlimited = console.options.update(width=_NO_LIMIT)
    width = Measurement.get(console, unlimited, table).maximum
    for segments in console.render_lines(table, unlimited.update(width=width), pad=False):
        console.out("".join(segment.text for segment in segments).rstrip(), highlight=False)


def _footnotes(comparison: Comparison) -> list[str]:
    marked = [f"{_MARK} {printable(warning)}" for warning in comparison.warnings]
    return [f"speed-up against {_baseline_name(comparison)}", *marked]


def _baseline_name(comparison: Comparison) -> str:
    base = next(row for row in comparison.rows if row.run_id == comparison.baseline_id)
    return f"{printable(base.name)} ({base.run_id[:8]})"


def _columns(comparison: Comparison) -> list[_Column]:
    """The columns of the table; those of a rate that no run needs are left out."""
    rows = comparison.rows
    columns = [
        _Column("run", [printable(row.name) + (f" {_MARK}" if row.suspect else "") for row in rows], folds=True),
        _Column("id", [row.run_id[:8] for row in rows]),
        _Column("model", [_word(row.model) for row in rows], folds=True),
        _Column("backend", [_word(row.backend) for row in rows]),
        _Column("ort\nactive", [_word(row.ort_active) for row in rows]),
        _Column("trainer", [_word(row.trainer) for row in rows], folds=True),
        _Column("world\nsize", [_word(row.world_size) for row in rows], numeric=True),
        _Column("status", [_word(row.status) for row in rows]),
    ]
    has_tokens = any(row.tokens_per_second_median is not None for row in rows)
    if has_tokens or all(row.samples_per_second_median is None for row in rows):
        columns.append(_Column("tokens\n/s", [_rate(row.tokens_per_second_median) for row in rows], numeric=True))
    samples = [None if row.tokens_per_second_median is not None else row.samples_per_second_median for row in rows]
    if any(value is not None for value in samples):
        columns.append(_Column("samples\n/s", [_rate(row.samples_per_second_median) for row in rows], numeric=True))
    return [
        *columns,
        _Column("speed-\nup", [_ratio(row) for row in rows], numeric=True),
        _Column("p50\nms", [_milliseconds(row.step_seconds_p50) for row in rows], numeric=True),
        _Column("p95\nms", [_milliseconds(row.step_seconds_p95) for row in rows], numeric=True),
        _Column("peak\nGiB", [_formatted(row.peak_memory_gib, ".2f") for row in rows], numeric=True),
        _Column("last\nloss", [_formatted(row.last_loss, ".4g") for row in rows], numeric=True),
    ]


def _cells(columns: list[_Column]) -> Iterator[tuple[str, ...]]:
    return zip(*(column.values for column in columns), strict=True)


def _word(value: str | bool | None) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _MISSING if value is None else printable(value)


def printable(text: str) -> str:
    """Names come from a shared server: none may steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _formatted(value: float | None, spec: str) -> str:
    return _MISSING if value is None else f"{value:{spec}}"


def _rate(value: float | None) -> str:
    return _formatted(value, ",.0f" if value is not None and abs(value) >= 1000 else ".4g")


def _ratio(row: Row) -> str:
    return f"{row.speedup.ratio:.2f}x" if row.speedup else _MISSING


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _MISSING
    return _formatted(seconds * 1000, ",.0f" if seconds >= 1 else ".1f")


def _record(row: Row, missing: Any) -> dict[str, Any]:
    """A row for programs: exact values under their full names, in the order of the table."""
    speedup = row.speedup
    record = {
        "run": row.name,
        "run_id": row.run_id,
        "model": row.model,
        "backend": row.backend,
        "ort_active": row.ort_active,
        "trainer": row.trainer,
        "world_size": int(row.world_size) if row.world_size and row.world_size.isdecimal() else row.world_size,
        "status": row.status,
        "tokens_per_second_median": row.tokens_per_second_median,
        "samples_per_second_median": row.samples_per_second_median,
        "speedup": speedup and speedup.ratio,
        "speedup_metric": speedup and speedup.metric,
        "speedup_value": speedup and speedup.value,
        "speedup_baseline_value": speedup and speedup.baseline_value,
        "step_seconds_p50": row.step_seconds_p50,
        "step_seconds_p95": row.step_seconds_p95,
        "peak_memory_gib": row.peak_memory_gib,
        "last_loss": row.last_loss,
        "ort_suspect": row.suspect,
    }
    return {key: missing if value is None else _portable(value) for key, value in record.items()}


def _portable(value: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json(comparison: Comparison) -> str:
    document = {
        "uri": comparison.uri,
        "baseline": comparison.baseline_id,
        "runs": [_record(row, None) for row in comparison.rows],
        "warnings": comparison.warnings,
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(comparison: Comparison) -> str:
    records = [_record(row, _MISSING) for row in comparison.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({key: _word(value) if isinstance(value, bool) else value for key, value in record.items()})
    return text.getvalue()


def _markdown(comparison: Comparison) -> str:
    columns = _columns(comparison)
    lines = [
        _markdown_line([column.title.replace("-\n", "-").replace("\n", " ") for column in columns]),
        "|" + "|".join(" ---: " if column.numeric else " --- " for column in columns) + "|",
        *(_markdown_line(list(cells)) for cells in _cells(columns)),
        *(f"\n{line}" for line in _footnotes(comparison)),
    ]
    return "\n".join(lines) + "\n"


def _markdown_line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
