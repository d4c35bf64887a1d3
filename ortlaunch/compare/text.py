"""Renders a comparison as JSON, CSV or Markdown."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from ortlaunch.base.text import json_text, public_text
from ortlaunch.compare import figures
from ortlaunch.compare.columns import Column, columns_of, lines, mean_loss
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import RunRow
from ortlaunch.compare.statistics import Mean, Ratio
from ortlaunch.compare.table import difference_columns, footnotes

_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Signs, also in full width, with which a cell is a formula for a spreadsheet; =cmd|… starts a program."""


def as_json(comparison: Comparison) -> str:
    """Returns the whole comparison as JSON with exact values."""
    document = {
        "uri": comparison.uri,
        "mlflow_url": comparison.url,
        "baseline": comparison.baseline_id,
        "baseline_reason": comparison.why or None,
        "runs": [_record(row, None) for row in comparison.rows],
        "groups": [_group_record(group) for group in comparison.groups],
        "differences": {
            difference.key: dict(zip((group.label for group in comparison.groups), difference.values, strict=True))
            for difference in comparison.differences
        },
        "warnings": comparison.warnings,
        "notes": comparison.notes,
    }
    return json_text(document, allow_nan=False) + "\n"


def as_csv(comparison: Comparison) -> str:
    """Returns a line for each run as CSV."""
    group_of = {row.run_id: group.label for group in comparison.groups for row in group.rows}
    records = [_record(row, figures.MISSING) | {"group": group_of[row.run_id]} for row in comparison.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({key: _csv_cell(value) for key, value in record.items()})
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """Converts a value to a cell that no spreadsheet runs as a formula: an apostrophe says that a text is a text."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = public_text(value)
    return f"'{text}" if text != figures.MISSING and text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def as_markdown(comparison: Comparison, *, each: bool = False) -> str:
    """Returns the table, its footnotes and the differences as Markdown."""
    text = _markdown_table(columns_of(comparison, each=each))
    text += "".join(f"\n{_escaped(line)}\n" for line in footnotes(comparison, each=each))
    if comparison.differences:
        text += "\n" + _markdown_table(difference_columns(comparison))
    return text


def _record(row: RunRow, missing: Any) -> dict[str, Any]:
    """Returns a row with exact values under their full names, in the order of the table."""
    speedup, memory = row.speedup, row.memory
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
        "memory_ratio": memory and memory.ratio,
        "memory_baseline_value": memory and memory.baseline_value,
        "last_loss": row.last_loss,
        "steady_windows": row.steady_windows,
        "ort_suspect": row.suspect,
    }
    return {key: missing if value is None else _portable(value) for key, value in record.items()}


def _group_record(group: Group) -> dict[str, Any]:
    loss = mean_loss(group)
    return {
        "group": group.label,
        "baseline": group.is_baseline,
        "runs": [row.run_id for row in group.rows],
        "seeds": group.seeds,
        "status": group.status,
        "tokens_per_second_median": _mean_record(group.tokens),
        "samples_per_second_median": _mean_record(group.samples),
        "peak_memory_gib": _mean_record(group.peak),
        "last_loss": None if loss is None else _portable(loss),
        "speedup": _ratio_record(group.speedup),
        "memory_ratio": _ratio_record(group.memory),
    }


def _mean_record(mean: Mean | None) -> dict[str, Any] | None:
    return None if mean is None else {"runs": mean.count, "mean": mean.mean, "interval_95": mean.interval}


def _ratio_record(ratio: Ratio | None) -> dict[str, Any] | None:
    return (
        None
        if ratio is None
        else {
            "ratio": ratio.ratio,
            "interval_95": ratio.interval and [_portable(bound) for bound in ratio.interval],
            "undecided": ratio.undecided,
            "metric": ratio.metric,
            "value": ratio.value,
            "baseline_value": ratio.baseline_value,
        }
    )


def _portable(value: Any) -> Any:
    """Converts NaN and infinity to text, because JSON does not have them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _markdown_table(columns: list[Column]) -> str:
    heading = _markdown_line([column.heading for column in columns])
    rule = "|" + "|".join(" ---: " if column.numeric else " --- " for column in columns) + "|"
    return "\n".join([heading, rule, *(_markdown_line(list(cells)) for cells in lines(columns))]) + "\n"


def _markdown_line(cells: list[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Escapes the characters that Markdown would read as a table's border, an HTML tag, a link or a picture."""
    for char in "|[]":
        text = text.replace(char, f"\\{char}")
    return text.replace("<", "&lt;")
