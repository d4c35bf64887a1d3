"""The comparison of several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from ortlaunch.compare.differences import Difference, differences
from ortlaunch.compare.fairness import warnings
from ortlaunch.compare.figures import Figure
from ortlaunch.compare.groups import Group, grouped
from ortlaunch.compare.runs import RunRow

_LINKED = 100
"""Number of runs up to which MLflow's own comparison page is readable."""


@dataclass(frozen=True)
class Comparison:
    """Runs and groups with their differences and warnings."""

    uri: str
    """The store, without credentials; empty if only run folders were read."""
    baseline_id: str
    rows: list[RunRow]
    groups: list[Group]
    each: list[Group]
    """Each run as a group of its own."""
    figures: Sequence[Figure] = ()
    """The figures that the user named."""
    differences: list[Difference] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks about runs that were left out."""
    why: str = ""
    """Why this run is the baseline; empty if the user named it."""

    @property
    def baseline(self) -> Group:
        """The group that all ratios refer to."""
        return next(group for group in self.groups if group.is_baseline)

    @property
    def has_repeats(self) -> bool:
        """Whether any group has several runs."""
        return len(self.groups) < len(self.rows)

    @property
    def url(self) -> str | None:
        """MLflow's own comparison page of these runs; None without a server, or with too many runs."""
        rows = [row for row in self.rows if row.folder is None]
        if not self.uri.startswith(("http://", "https://")) or not 1 < len(rows) <= _LINKED:
            return None
        runs = quote(json.dumps([row.run_id for row in rows], separators=(",", ":")))
        experiments = quote(json.dumps(sorted({row.experiment_id for row in rows}), separators=(",", ":")))
        parts = urlsplit(self.uri)
        # A browser asks for the credentials itself.
        server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        return f"{server}/#/compare-runs?runs={runs}&experiments={experiments}"


def compared(
    rows: list[RunRow],
    baseline_id: str,
    uri: str = "",
    notes: Sequence[str] = (),
    why: str = "",
    *,
    figures: Sequence[Figure] = (),
    each: bool = False,
) -> Comparison:
    """Compares runs with the baseline.

    Args:
        rows: the runs.
        baseline_id: the run whose group the others are compared with.
        uri: the store, without credentials.
        notes: remarks about runs that were left out.
        why: why this run is the baseline.
        figures: the figures that the user named.
        each: whether each run is a group of its own.
    """
    singles = grouped(rows, baseline_id, each=True)
    groups = singles if each else grouped(rows, baseline_id)
    unfair = warnings(groups, [figure.metric for figure in figures])
    said = [*notes, *_backend_reasons(rows)]
    return Comparison(uri, baseline_id, rows, groups, singles, figures, differences(groups), unfair, said, why)


def _backend_reasons(rows: list[RunRow]) -> list[str]:
    """Why runs have their backends whose configuration names none; runs with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if (reason := row.tags.get("ortlaunch.backend_reason")) is not None:
            names.setdefault(f"backend={row.backend}, {reason}", []).append(row.name)
    return [f"{', '.join(dict.fromkeys(of))}: {reason}" for reason, of in names.items()]
