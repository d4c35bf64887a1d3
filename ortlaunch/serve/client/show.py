"""Prints what a service has answered. All of it comes from others, so it is printed without control characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.tables import print_in_full_width
from ortlaunch.base.text import moment, public_text, say
from ortlaunch.follow.table import duration_text, rate_text

_ROW: dict[str, Callable[[dict[str, Any]], str]] = {
    "id": lambda row: row["id"],
    "name": lambda row: row["name"],
    "owner": lambda row: row["owner"],
    "experiment": lambda row: row["experiment"],
    "state": lambda row: row["state"],
    "step": lambda row: _step(row),
    "rate": lambda row: "" if row["rate"] is None else f"{rate_text(row['rate'])} {row['rate_unit']}",
    "loss": lambda row: "diverged" if row["diverged"] else "" if row["loss"] is None else f"{row['loss']:.4g}",
    "left": lambda row: "" if row["seconds_left"] is None else duration_text(row["seconds_left"]),
    "why": lambda row: row["reason"],
}


def rows(found: list[dict[str, Any]], total: int) -> None:
    """Prints runs as a table.

    Args:
        found: their rows.
        total: how many runs there are.
    """
    if not found:
        say("no runs")
        return
    cells = {title: [public_text(str(value(row))) for row in found] for title, value in _ROW.items()}
    _table({title: column for title, column in cells.items() if any(column)})
    if total > len(found):
        say(f"{len(found)} of {total} runs")


def detail(found: dict[str, Any]) -> None:
    """Prints everything about one run."""
    row = found["row"]
    lines = [
        ("run", f"{row['name']} ({row['id']}) of the experiment {row['experiment']}"),
        ("owner", row["owner"]),
        ("state", row["state"] + (f": {row['reason']}" if row["reason"] else "")),
        ("position", "" if row["position"] is None else f"{row['position']} in the queue"),
        ("run folder", found["place"]),
        ("where", found["launcher"]["place"]),
        ("steps", _step(row)),
        ("latest", _figures(row)),
        ("began", _moment(row["started"])),
        *(("changed", f"{one['key']}={one['value']}") for one in found["changed"]),
        *(("failure", f"rank {one['rank']} on {one['host']}: {one['message']}") for one in found["failures"]),
        ("checkpoint", found["checkpoints"][0]["name"] if found["checkpoints"] else ""),
        ("goodput", f"{100 * found['goodput']['share']:.0f} %" if found["goodput"] else ""),
        ("mlflow", _record(found["mlflow"])),
        *(("problem", text) for text in found["problems"]),
    ]
    shown = [(label, text) for label, text in lines if text]
    width = max(len(label) for label, _ in shown) + 1
    for label, text in shown:
        say(f"{label + ':':<{width}} {text}")


def submitted(answer: dict[str, Any]) -> None:
    """Prints what became of a submitted run."""
    position = f", {answer['position']} in the queue" if answer.get("position") else ""
    why = f": {answer['reason']}" if answer.get("reason") else ""
    say(f"{answer['id']} is {answer['state']}{position}{why}")


def outcome(row: dict[str, Any]) -> None:
    """Prints how a run ended that was asked to."""
    complete = [one for one in row["checkpoints"] if one["complete"]]
    checkpoint = f"; checkpoint of step {complete[0]['step']}" if complete else ""
    why = f" ({row['reason']})" if row["reason"] else ""
    say(f"{row['name']} ({row['id']}) is {row['state']}{why}{checkpoint}")


def comparison(answer: dict[str, Any]) -> None:
    """Prints a comparison as its tables."""
    say(answer["title"])
    for line in [*answer["facts"], *answer["warnings"]]:
        say(line)
    titles = [str(column["title"]) for column in answer["columns"]]
    _table(_columns(titles, answer["rows"]))
    differences = answer["differences"]
    if differences["rows"]:
        say("what the runs differ in:")
        _table(_columns([str(column["title"]) for column in differences["columns"]], differences["rows"]))


def _columns(titles: list[str], lines: list[list[str]]) -> dict[str, list[str]]:
    return {title: [public_text(str(line[number])) for line in lines] for number, title in enumerate(titles)}


def _table(columns: dict[str, list[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for title in columns:
        table.add_column(Text(title), no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    print_in_full_width(table, Console())


def _step(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return ""
    return f"{row['step']} of {row['steps']}" if row["steps"] else str(row["step"])


def _figures(row: dict[str, Any]) -> str:
    parts = [] if row["loss"] is None else [f"loss {row['loss']:.4g}"]
    if row["rate"] is not None:
        parts.append(f"{rate_text(row['rate'])} {row['rate_unit']}")
    return ", ".join(parts)


def _record(found: dict[str, Any] | None) -> str:
    """Where MLflow has the run."""
    if found is None:
        return ""
    return str(found["url"]) if found["url"] else f"{found['run_id']} in {found['store']}"


def _moment(seconds: float) -> str:
    return moment(seconds) if seconds else ""
