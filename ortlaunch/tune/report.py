"""The result of a tuning: as plain values, and as text."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.tables import print_in_full_width
from ortlaunch.base.text import counted, public_text
from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.intervals import interval_of
from ortlaunch.tune.search import NEEDS_MORE, NO_TIME, Finding
from ortlaunch.tune.space import BACKEND, CHECKPOINTING, MICRO, TRAINER, WORKERS, Cell, Space

_BUSY = 0.1
"""Share of the cores in other hands from which on a trial counts as disturbed."""
_MOST_ROWS = 20
_LONGEST = 110
_WIDTH = 120
"""Characters of a line of the table where the output is no terminal."""
_LEAST_VERDICT = 20
"""Characters of a verdict's line, whatever the terminal's width is."""
_TITLES = {WORKERS: "workers", MICRO: "micro-\nbatch", CHECKPOINTING: "check-\npointing"}
_ON_THE_LEFT = (BACKEND, TRAINER, _TITLES[CHECKPOINTING])


def report_of(finding: Finding, space: Space, work: float) -> dict[str, Any]:
    """The result.

    Args:
        finding: what the schedule found.
        space: the cells.
        work: samples of the whole run.
    """
    winner = finding.winner
    return {
        "model": space.asked.model.target or space.asked.model.name,
        "steps": space.asked.train.steps,
        "global_batch": space.batch,
        "free": list(space.free),
        "winner": None if winner is None else dict(winner.values),
        "overrides": [] if winner is None else space.overrides(winner),
        "score": finding.score,
        "interval": finding.interval,
        "unit": "samples/s over train.steps, with the start that the backend costs",
        "asked": dict(space.cell.values),
        "asked_score": finding.asked_score,
        "speedup": finding.score / finding.asked_score if finding.asked_score and finding.score else None,
        "ties": [dict(cell.values) for cell in finding.ties],
        "trials": _trials(finding, work),
        "without_time": sum(reason == NO_TIME for reason in finding.pruned.values()),
        "not_tried": grouped(space.refused | finding.pruned),
        "trials_run": sum(map(len, finding.measured.values())),
        "cells": len(space.cells) + len(space.refused),
        "seconds": finding.spent,
        "of_machine": sum(outcomes[-1].is_of_machine for outcomes in finding.measured.values()),
        "busy": _busy(finding),
    }


def _trials(finding: Finding, work: float) -> list[dict[str, Any]]:
    """A line for each tried cell, the best first."""
    rows = [_row(cell, outcomes, finding, work) for cell, outcomes in finding.measured.items()]
    return sorted(rows, key=lambda row: (row["verdict"] != "winner", row["verdict"] != "tie", -row["score"]))


def _row(cell: Cell, outcomes: list[Outcome], finding: Finding, work: float) -> dict[str, Any]:
    good = [one for one in outcomes if one.ok]
    # A winner's first figures flatter: what was measured in rounds and afterwards counts, or else the latest trial.
    last = good[-1] if good else outcomes[-1]
    rounds = finding.rounds.get(cell, [])
    counted = _of_rounds(good, rounds, work) or good[-1:]
    failed = next((one for one in reversed(outcomes) if not one.ok), None)
    verdict = finding.dropped.get(cell, "")
    if cell == finding.winner:
        verdict = "winner"
    elif cell in finding.ties:
        verdict = "tie"
    elif failed is not None and not verdict:
        verdict = f"{failed.status}: {failed.reason}"
    return {
        "cell": dict(cell.values),
        "trials": len(outcomes),
        "score": statistics.geometric_mean(one.score(work) for one in counted) if counted else 0.0,
        "interval": interval_of(rounds),
        "rate": statistics.geometric_mean(one.rate for one in counted) if counted else 0.0,
        "start_seconds": max((one.start for one in good), default=0.0),
        "peak_bytes": max(one.peak_bytes for one in outcomes),
        "others": max(one.others for one in outcomes),
        "verdict": verdict or "slower",
        "run": last.run,
    }


def _of_rounds(outcomes: list[Outcome], rounds: list[float], work: float) -> list[Outcome]:
    """The outcomes of a cell whose scores have these logarithms, the latest where several have the same."""
    left, found = list(rounds), []
    for one in reversed(outcomes):
        if (log := math.log(one.score(work))) in left:
            left.remove(log)
            found.append(one)
    return found


def grouped(reasons: dict[Cell, str]) -> list[dict[str, Any]]:
    """The reasons for cells that were not tried, each with its cells."""
    counts = Counter(reasons.values())
    return [
        {"reason": reason, "count": count, "cells": [str(cell) for cell, why in reasons.items() if why == reason]}
        for reason, count in counts.most_common()
    ]


def _busy(finding: Finding) -> dict[str, Any]:
    """How many trials other processes disturbed, and how much the worst of them."""
    shares = [one.others for outcomes in finding.measured.values() for one in outcomes]
    return {"trials": sum(share >= _BUSY for share in shares), "most": max(shares, default=0.0)}


def render(result: dict[str, Any], console: Console) -> None:
    """Prints a result that `ortlaunch.tune.report` made."""
    _print_table(result["trials"][:_MOST_ROWS], console)
    if len(result["trials"]) > _MOST_ROWS:
        console.out(f"and {len(result['trials']) - _MOST_ROWS} more (--format json lists all)", highlight=False)
    for line in _lines(result):
        console.out(line, highlight=False)


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
    texts = {axis: [str(row["cell"][axis]) for row in rows] for axis in (rows[0]["cell"] if rows else ())}
    # What all have in common is in the command.
    values = {_TITLES.get(axis, axis.rpartition(".")[2]): cells for axis, cells in texts.items() if len(set(cells)) > 1}
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
            f"! {counted(result['of_machine'], 'configuration')} failed by something on this machine: the same "
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
    if result["free"]:
        lines.append(f"! {', '.join(result['free'])} freed: the winner trains differently")
    if result["winner"][MICRO] != result["asked"][MICRO]:
        lines.append(
            "! the winner has another micro-batch than asked: a model with BatchNorm computes its statistics over it "
            f"and trains differently (--hold={MICRO} keeps it)"
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
    lines.append(f"run it:  {result['command']}")
    return lines + [f"compare: {command}" for command in result["compare"]]


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f"{_speed(interval[0])} to {_speed(interval[1])}"


def _speed(samples: float) -> str:
    """Samples a second, with as many digits as are of use."""
    return f"{samples:,.1f}" if samples < 1000 else f"{samples:,.0f}"


def _of(interval: list[float] | None) -> str:
    return "" if interval is None else f" (99 % interval with its rounds {_interval(interval)})"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
