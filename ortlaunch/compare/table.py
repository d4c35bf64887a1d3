"""Prints a comparison: as a table for people, as Markdown, or as JSON with exact values."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.tables import print_in_full_width
from ortlaunch.base.text import json_text, public_text
from ortlaunch.compare.columns import Column, columns_of, difference_columns, footnotes, lines
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.figures import SUSPECT
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import MEMORY, RATES
from ortlaunch.compare.statistics import Change, Mean, Ratio

FORMATS = ("table", "json", "markdown")
_SECONDS = ("summary/step_seconds_p50", "summary/step_seconds_p95")


def render(comparison: Comparison, format: str, console: Console) -> None:
    """Prints a comparison.

    Args:
        comparison: the comparison to print.
        format: one of `FORMATS`.
        console: where to print; output that is no terminal is not coloured, wrapped or cut.
    """
    if format == "table":
        _print_table(comparison, console)
    else:
        console.out(as_json(comparison) if format == "json" else _markdown(comparison), end="", highlight=False)


def _print_table(comparison: Comparison, console: Console) -> None:
    doubtful = [group.is_doubtful for group in comparison.groups]
    _print(columns_of(comparison.groups, comparison.figures), console, doubtful)
    for line in _below(comparison):
        console.print(Text(line), soft_wrap=not console.is_terminal)
    if comparison.differences:
        console.print()
        _print(difference_columns(comparison), console)


def _print(columns: list[Column], console: Console, doubtful: list[bool] | None = None) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="right" if column.numeric else "left",
            no_wrap=not column.folds,
            overflow="fold",
            min_width=column.least_width,
        )
    for number, cells in enumerate(lines(columns)):
        table.add_row(*map(Text, cells), style="yellow" if doubtful and doubtful[number] else "")
    if console.is_terminal and sum(column.least_width + 1 for column in columns) <= console.width:
        console.print(table)
    else:
        print_in_full_width(table, console)


def _below(comparison: Comparison) -> list[str]:
    listed = footnotes(comparison) + ([f"in MLflow: {comparison.url}"] if comparison.url else [])
    return [public_text(line) for line in [*listed, *(f"{SUSPECT} {warning}" for warning in comparison.warnings)]]


def _markdown(comparison: Comparison) -> str:
    text = _markdown_table(columns_of(comparison.groups, comparison.figures))
    text += "".join(f"\n{_escaped(line)}\n" for line in _below(comparison))
    return f"{text}\n{_markdown_table(difference_columns(comparison))}" if comparison.differences else text


def _markdown_table(columns: list[Column]) -> str:
    rule = "|" + "|".join(" ---: " if column.numeric else " --- " for column in columns) + "|"
    head, *rows = (
        "| " + " | ".join(map(_escaped, cells)) + " |"
        for cells in ([column.heading for column in columns], *lines(columns))
    )
    return "\n".join([head, rule, *rows]) + "\n"


def _escaped(text: str) -> str:
    """Escapes the characters that Markdown would read as a table's border, an HTML tag, a link or a picture."""
    for char in "|[]":
        text = text.replace(char, f"\\{char}")
    return text.replace("<", "&lt;")


def as_json(comparison: Comparison) -> str:
    """Returns the whole comparison as JSON with exact values."""
    labels = [group.label for group in comparison.groups]
    document = {
        "uri": comparison.uri or None,
        "mlflow_url": comparison.url,
        "baseline": comparison.baseline_id,
        "baseline_reason": comparison.why or None,
        "runs": [_run_record(group, comparison) for group in comparison.each],
        "groups": [_group_record(group, comparison) for group in comparison.groups],
        "differences": {one.key: dict(zip(labels, one.values, strict=True)) for one in comparison.differences},
        "warnings": comparison.warnings,
        "notes": comparison.notes,
    }
    return json_text(_portable(document), allow_nan=False) + "\n"


def _run_record(group: Group, comparison: Comparison) -> dict[str, Any]:
    """Returns a run with exact values under their full names; what is missing is null."""
    row, speedup, memory = group.first, group.speedup, group.memory
    world_size = row.tags.get("ortlaunch.world_size")
    return {
        "run": row.name,
        "run_id": row.run_id,
        "model": row.model,
        "backend": row.backend,
        "ort_active": row.ort_active,
        "trainer": row.trainer,
        "world_size": int(world_size) if world_size and world_size.isdecimal() else world_size,
        "status": row.status,
        **{_short(metric): row.metrics.get(metric) for metric in RATES},
        "speedup": speedup and speedup.ratio,
        "speedup_metric": speedup and _short(speedup.metric),
        "speedup_value": speedup and speedup.value,
        "speedup_baseline_value": speedup and speedup.baseline_value,
        **{_short(metric): row.metrics.get(metric) for metric in (*_SECONDS, MEMORY)},
        "memory_ratio": memory and memory.ratio,
        "memory_baseline_value": memory and memory.baseline_value,
        "last_loss": row.last_loss,
        "steady_windows": row.metrics.get("summary/steady_windows"),
        "ort_suspect": row.suspect,
        "figures": {figure.metric: row.metrics.get(figure.metric) for figure in comparison.figures},
    }


def _group_record(group: Group, comparison: Comparison) -> dict[str, Any]:
    return {
        "group": group.label,
        "baseline": group.is_baseline,
        "runs": [row.run_id for row in group.rows],
        "seeds": group.seeds,
        "status": group.status,
        **{_short(metric): _mean_record(group.mean(metric)) for metric in (*RATES, MEMORY)},
        "last_loss": group.loss,
        "speedup": _against(group.speedup, "ratio"),
        "memory_ratio": _against(group.memory, "ratio"),
        "figures": {
            figure.metric: {
                "better": figure.better,
                "value": _mean_record(group.mean(figure.metric)),
                "change": (change := group.change(figure.metric)) and _against(change, "difference"),
                "verdict": change and change.verdict(figure.better),
            }
            for figure in comparison.figures
        },
    }


def _mean_record(mean: Mean | None) -> dict[str, Any] | None:
    return None if mean is None else {"runs": mean.count, "mean": mean.mean, "interval_95": mean.interval}


def _against(found: Ratio | Change | None, name: str) -> dict[str, Any] | None:
    """Returns a ratio or difference with both values."""
    if found is None:
        return None
    facts = {"interval_95": found.interval, "undecided": found.undecided, "metric": _short(found.metric)}
    return {name: getattr(found, name), **facts, "value": found.value, "baseline_value": found.baseline_value}


def _short(metric: str) -> str:
    return metric.removeprefix("summary/")


def _portable(value: Any) -> Any:
    """Converts NaN and infinity to text, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: _portable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
