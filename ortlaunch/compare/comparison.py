"""Runs side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from urllib.parse import quote, urlsplit

from ortlaunch.compare.differences import Difference, differences
from ortlaunch.compare.fairness import warnings
from ortlaunch.compare.groups import Group, grouped
from ortlaunch.compare.runs import MEMORY, RATES, Quotient, RunRow

_LINKED = 100
"""Runs that MLflow's own page still shows in a useful way."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, and what is to be known about them."""

    uri: str
    """The store, without credentials."""
    baseline_id: str
    rows: list[RunRow]
    groups: list[Group]
    differences: list[Difference] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out."""
    why: str = ""
    """What makes the baseline the baseline; empty where the user named it."""
    url: str | None = None
    """MLflow's own page of these runs."""

    @property
    def baseline(self) -> Group:
        """The group that the ratios refer to."""
        return next(group for group in self.groups if group.is_baseline)

    @property
    def has_repeats(self) -> bool:
        """Whether some configuration was run more than once."""
        return any(len(group.rows) > 1 for group in self.groups)

    @property
    def has_undecided(self) -> bool:
        """Whether some ratio's interval contains 1."""
        ratios = (ratio for group in self.groups for ratio in (group.speedup, group.memory))
        return any(ratio is not None and ratio.undecided for ratio in ratios)


def compared(
    rows: list[RunRow], baseline_id: str, uri: str, notes: list[str] | None = None, why: str = ""
) -> Comparison:
    """Compares runs, one of which is the baseline, and `why` it is."""
    base = next(row for row in rows if row.run_id == baseline_id)
    rows = [replace(row, speedup=_speedup(row, base), memory=_quotient(row, base, MEMORY)) for row in rows]
    groups = grouped(rows, baseline_id)
    return Comparison(
        uri,
        baseline_id,
        rows,
        groups,
        differences(groups),
        warnings(groups),
        notes or [],
        why,
        compare_url(uri, rows),
    )


def _speedup(row: RunRow, base: RunRow) -> Quotient | None:
    quotients = (_quotient(row, base, metric) for metric in RATES)
    return next((quotient for quotient in quotients if quotient is not None), None)


def _quotient(row: RunRow, base: RunRow, metric: str) -> Quotient | None:
    value, reference = row.figure(metric), base.figure(metric)
    return Quotient(value / reference, metric, value, reference) if value is not None and reference else None


def compare_url(uri: str, rows: list[RunRow]) -> str | None:
    """MLflow's page that compares these runs; None for a store without a server, and for more runs than it shows."""
    if not uri.startswith(("http://", "https://")) or not 1 < len(rows) <= _LINKED:
        return None
    runs = quote(json.dumps([row.run_id for row in rows], separators=(",", ":")))
    experiments = quote(json.dumps(sorted({row.experiment_id for row in rows}), separators=(",", ":")))
    return f"{server_url(uri)}/#/compare-runs?runs={runs}&experiments={experiments}"


def server_url(uri: str) -> str:
    """Where a browser finds the server of an http URI; a browser asks for credentials by itself."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
