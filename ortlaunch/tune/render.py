"""Prints the result of a tuning as text."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.tables import print_in_full_width
from ortlaunch.base.text import counted, public_text
from ortlaunch.tune.pruning import CHECKPOINTING, MICRO, NEEDS_MORE
from ortlaunch.tune.words import ALLOCATOR, BACKEND, OPTIMIZER, PRECISION, THREADS, TRAINER, WORKERS

_MOST_ROWS = 20
_LONGEST = 110
_WIDTH = 120
"""Characters of a line of the table where the output is no terminal."""
_LEAST_VERDICT = 20
"""Characters of a verdict's line, whatever the terminal's width is."""
_TITLES = {MICRO: "micro-\nbatch", CHECKPOINTING: "check-\npointing", ALLOCATOR: "allo-\ncator"}
"""Columns of small values, whose titles take two lines."""
_WITH_THREADS = "workers\nthreads"
"""The column of both, such as 2 x 1."""
_ON_THE_LEFT = (*(BACKEND, TRAINER, PRECISION, OPTIMIZER), _TITLES[CHECKPOINTING], _TITLES[ALLOCATOR])


def render(result: dict[str, Any], console: Console) -> None:
    """Prints a result that `ortlaunch.tune.report` made."""
    _print_table(result["trials"][:_MOST_ROWS], console)
    if len(result["trials"]) > _MOST_ROWS:
        console.out(f"and {len(result['trials']) - _MOST_ROWS} more (--format json lists all)", highlight=False)
    for line in _lines(result):
        console.out(line, highlight=False)


def can_be_shown(result: dict[str, Any]) -> bool:
    """Whether a result is whole. One that another version has written, or that is damaged, may lack something."""
    try:
        render(result, Console(file=io.StringIO()))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return isinstance(result.get("minutes"), int | float) and isinstance(result.get("date"), str)


def not_tried(groups: list[dict[str, Any]]) -> list[str]:
    """A line for each reason not to try cells. Reasons that differ in the cell that they name share one."""
    counts: Counter[str] = Counter()
    for one in groups:
        is_of_memory = one["reason"].startswith(NEEDS_MORE)
        counts[f"{NEEDS_MORE}one that does not fit" if is_of_memory else one["reason"]] += one["count"]
    return [f"not tried: {count} x {_shortened(reason)}" for reason, count in counts.most_common()]


def _print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the trials. The verdicts, which may be errors, take the width that the other columns leave."""
    columns = _columns(rows)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    width = _LEAST_VERDICT
    for title, cells in columns.items():
        table.add_column(title, justify="left" if title in _ON_THE_LEFT else "right", no_wrap=True)
        width += max(map(len, [*title.splitlines(), *cells])) + 1
    table.add_column("verdict", overflow="fold")
    for values, row in zip(zip(*columns.values(), strict=True), rows, strict=True):
        table.add_row(*map(Text, values), Text(_shortened(public_text(row["verdict"]))))
    print_in_full_width(table, console, max(width, console.width if console.is_terminal else _WIDTH))


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The columns before the verdict, by their titles."""
    axes: list[str] = list(rows[0]["cell"]) if rows else []
    values = {_TITLES.get(axis, axis): [str(row["cell"][axis]) for row in rows] for axis in axes}
    if THREADS in values:
        threads = values.pop(THREADS)
        both = [f"{workers} x {count}" for workers, count in zip(values[WORKERS], threads, strict=True)]
        values = {_WITH_THREADS if title == WORKERS else title: values[title] for title in values}
        values[_WITH_THREADS] = both
    return {
        **values,
        "trials": [str(row["trials"]) for row in rows],
        "samples/s": [_speed(row["score"]) if row["score"] else "" for row in rows],
        "99 %\ninterval": [_interval(row["interval"]) for row in rows],
        "steady": [_speed(row["rate"]) if row["score"] else "" for row in rows],
        "start\ns": [f"{row['start_seconds']:.1f}" if row["score"] else "" for row in rows],
        "GiB": [f"{row['peak_bytes'] / 2**30:.2f}" for row in rows],
    }


def _lines(result: dict[str, Any]) -> list[str]:
    lines = not_tried(result["not_tried"])
    lines.append(
        f"{counted(result['trials_run'], 'trial')} of {counted(len(result['trials']), 'configuration')} in "
        f"{result['seconds'] / 60:.1f} min; "
        f"samples/s over train.steps={result['steps']} with the start that the backend costs"
    )
    if result.get("without_time"):
        lines.append(
            f"! {result['without_time']} of {result['without_time'] + len(result['trials'])} configurations had no "
            "time: the same command with more --minutes goes on"
        )
    if result.get("of_machine"):
        lines.append(
            f"! {counted(result['of_machine'], 'configuration')} failed twice by something on this machine: the same "
            "command tries again"
        )
    if result["busy"]["trials"]:
        lines.append(
            f"! other processes had up to {result['busy']['most']:.0%} of the cores in {result['busy']['trials']} of "
            f"{result['trials_run']} trials: speeds are too low there, and the order may be wrong (--again measures "
            "anew)"
        )
    if result["winner"] is None:
        return [*lines, f"no configuration trained; what each trial printed is in {result['folder']}/trials"]
    if "batch" in result["free"] or "optimizer" in result["free"] or "precision" in result["free"]:
        lines.append(f"! {', '.join(result['free'])} freed: the winner trains differently, at the same learning rate")
    if result["winner"][MICRO] != result["asked"][MICRO]:
        lines.append(
            "! the winner has another micro-batch than asked: a model with BatchNorm computes its statistics over it "
            "and trains differently (--hold micro-batch keeps it)"
        )
    if result["score"]:
        speed = f"{_speed(result['score'])} samples/s, measured once more{_of(result['interval'])}"
    else:
        speed = "its last measurement failed"
    if result["winner"] == result["asked"]:
        lines.append(f"fastest: the configuration as asked, {speed}")
    else:
        ratio = f", {result['speedup']:.2f} times that as asked" if result["speedup"] else ""
        lines.append(f"fastest: {' '.join(result['overrides'])}\n         {speed}{ratio}")
    if result["ties"]:
        others = "; ".join(" ".join(f"{axis}={value}" for axis, value in tie.items()) for tie in result["ties"])
        lines.append(f"tie: the rounds did not separate it from {others}")
    if result["check"]:
        lines.append(f"check: {result['check']}")
    if result["command"]:
        lines.append(f"run it:  {result['command']}")
    lines.append(f"job:     {result['job']}")
    lines += [f"compare: {command}" for command in result["compare"]]
    return lines


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f"{_speed(interval[0])} to {_speed(interval[1])}"


def _speed(samples: float) -> str:
    """Samples a second, with as many digits as are of use."""
    return f"{samples:,.1f}" if samples < 1000 else f"{samples:,.0f}"


def _of(interval: list[float] | None) -> str:
    return "" if interval is None else f" (99 % interval with its rounds {_interval(interval)})"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
