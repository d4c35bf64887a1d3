"""The result of a tuning as plain values."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.intervals import interval_of
from ortlaunch.tune.plan import Finding
from ortlaunch.tune.schedule import NO_TIME
from ortlaunch.tune.space import Space

_BUSY = 0.1
"""Share of the cores in other hands from which on a trial counts as disturbed."""


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
