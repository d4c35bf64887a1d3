"""The comparison of several runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from urllib.parse import quote, urlsplit

from ortlaunch.compare.differences import Difference, differences
from ortlaunch.compare.fairness import warnings
from ortlaunch.compare.groups import Group, grouped
from ortlaunch.compare.runs import MEMORY, RATES, Quotient, RunRow

_LINKED = 100
"""Number of runs up to which MLflow's own comparison page is readable."""


@dataclass(frozen=True)
class Comparison:
    """Runs and groups with their ratios, differences and warnings."""

    uri: str
    """The store, without credentials."""
    baseline_id: str
    rows: list[RunRow]
    groups: list[Group]
    differences: list[Difference] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks about runs that were left out."""
    why: str = ""
    """Why this run is the baseline; empty if the user named it."""
    url: str | None = None
    """MLflow's own comparison page of these runs."""

    @property
    def baseline(self) -> Group:
        """The group that all ratios refer to."""
        return next(group for group in self.groups if group.is_baseline)

    @property
    def has_repeats(self) -> bool:
        """Whether any configuration was run more than once."""
        return any(len(group.rows) > 1 for group in self.groups)

    @property
    def has_undecided(self) -> bool:
        """Whether the interval of any ratio contains 1."""
        ratios = (ratio for group in self.groups for ratio in (group.speedup, group.memory))
        return any(ratio is not None and ratio.undecided for ratio in ratios)


def compared(
    rows: list[RunRow], baseline_id: str, uri: str, notes: list[str] | None = None, why: str = ""
) -> Comparison:
    """Compares runs with the baseline, and stores `why` it is the baseline."""
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
        [*(notes or []), *_backend_reasons(rows)],
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
    """Returns the URL of MLflow's comparison page; None without a server or with too many runs."""
    if not uri.startswith(("http://", "https://")) or not 1 < len(rows) <= _LINKED:
        return None
    runs = quote(json.dumps([row.run_id for row in rows], separators=(",", ":")))
    experiments = quote(json.dumps(sorted({row.experiment_id for row in rows}), separators=(",", ":")))
    return f"{server_url(uri)}/#/compare-runs?runs={runs}&experiments={experiments}"


def server_url(uri: str) -> str:
    """Returns the server's URL for a browser, without credentials; the browser asks for them itself."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


def _backend_reasons(rows: list[RunRow]) -> list[str]:
    """Why runs have their backends whose configuration names none; runs with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if (reason := row.tags.get("ortlaunch.backend_reason")) is not None:
            names.setdefault(f"backend={row.backend}, {reason}", []).append(row.name)
    return [f"{', '.join(dict.fromkeys(of))}: {reason}" for reason, of in names.items()]
