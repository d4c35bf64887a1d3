"""Reads the histories of the metrics to plot, a run at a time; each is thinned before the next is read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from ortlaunch.base.text import public_text
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import RunRow, logged_number
from ortlaunch.compare.sources import Sources
from ortlaunch.run.events import LOSS
from ortlaunch.run.state import FIRST_STEP

if TYPE_CHECKING:
    from mlflow.entities import Metric

    from ortlaunch.tracking.translate import Point as Logged

LIMIT = 20
"""Number of runs that are drawn by default."""
POINTS = 600
"""Points kept per curve, which is more than a plot has pixels. With many runs it is less, down to `_LEAST_POINTS`."""
_LEAST_POINTS = 100
_ALL_POINTS = 60_000
"""Points per plot, so that a browser can still open a page with a thousand runs."""
TITLES = {
    "throughput/tokens_per_second": "Throughput (tokens/s)",
    "throughput/samples_per_second": "Throughput (samples/s)",
    "memory/peak_allocated_gib": "Peak memory allocated on the GPU (GiB)",
    "memory/rss_gib": "Resident memory (GiB)",
    LOSS: "Training loss",
}
"""Titles of the plots, in their order; of the first two, and of the next two, a run has one plot."""

Point = tuple[int, float, float | None]
"""Step, seconds since the start of the run, and the value; the value is None if it was not finite."""


@dataclass(frozen=True)
class Curve:
    """The history of one metric of one run."""

    metric: str
    run: int
    """Index of the run among those that are drawn."""
    points: list[Point]
    pauses: list[int] = field(default_factory=list)
    """Indices of the points at which a later attempt begins; nothing ran between the previous point and this one."""


@dataclass(frozen=True)
class Drawn:
    """A run whose curves are drawn."""

    row: RunRow
    label: str
    """Starts with the run's number, so that labels are unique and not empty."""
    group: int
    """Index of its group."""


@dataclass(frozen=True)
class Curves:
    """All curves to draw."""

    runs: list[Drawn]
    curves: list[Curve]
    left_out: int
    """Number of runs with a history that are not drawn."""

    @property
    def metrics(self) -> list[str]:
        """The metrics that any run has, in the order of the plots."""
        there = {curve.metric: None for curve in self.curves}
        return [metric for metric in TITLES if metric in there] + [metric for metric in there if metric not in TITLES]


def read_curves(sources: Sources, comparison: Comparison, limit: int) -> Curves:
    """Reads the curves of the first runs; the baseline's group comes first.

    Args:
        sources: where the runs were found.
        comparison: the comparison with the runs.
        limit: the largest number of runs to draw.
    """
    named = [figure.metric for figure in comparison.figures]
    runs = _drawn(comparison, named, limit)
    most = max(_LEAST_POINTS, min(POINTS, _ALL_POINTS // max(1, len(runs))))
    curves = []
    for number, drawn in enumerate(runs):
        # Every attempt logs this metric before all others, at the step from which it continues.
        metrics = _metrics(drawn.row, named)
        found = sources.histories(drawn.row, [*metrics, FIRST_STEP])
        begins = sorted((point.timestamp - drawn.row.started) / 1000.0 for point in found[FIRST_STEP])[1:]
        for metric in metrics:
            points = thinned(list(_history(drawn.row, found[metric])), most)
            curves.append(Curve(metric, number, points, _pauses(points, begins)))
    left_out = sum(1 for row in comparison.rows if _metrics(row, named)) - len(runs)
    return Curves(runs, curves, left_out)


def _metrics(row: RunRow, named: Sequence[str]) -> list[str]:
    """Returns the metrics to plot of a run: of rates and of memory one, the loss, and those that the user named."""
    tokens, samples, gpu, ram, loss = TITLES
    kinds = ((tokens, samples), (gpu, ram), (loss,), *((one,) for one in named))
    found = (next((one for one in kind if one in row.metrics), None) for kind in kinds)
    return [one for one in dict.fromkeys(found) if one is not None]


def _drawn(comparison: Comparison, named: Sequence[str], limit: int) -> list[Drawn]:
    """Takes one run of each group in turn, so that repeats of one group do not displace another group."""
    groups = sorted(enumerate(comparison.groups), key=lambda pair: not pair[1].is_baseline)
    rounds = zip_longest(*([(n, group, row) for row in group.rows if _metrics(row, named)] for n, group in groups))
    chosen = [one for turn in rounds for one in turn if one is not None][:limit]
    chosen.sort(key=lambda one: (not one[1].is_baseline, one[0]))
    return [Drawn(row, _label(number, group, row), n) for number, (n, group, row) in enumerate(chosen, 1)]


def _label(number: int, group: Group, row: RunRow) -> str:
    name = group.label if len(group.rows) == 1 else row.name
    return f"{number} {public_text(name)}" + (" (baseline)" if group.is_baseline and len(group.rows) == 1 else "")


def _history(row: RunRow, logged: Sequence[Metric | Logged]) -> Iterator[Point]:
    """Yields the latest point of each step, in the order of steps. A resume with other keys trains steps again."""
    points = sorted(logged, key=lambda point: (point.step, point.timestamp))
    for point in {point.step: point for point in points}.values():
        value = logged_number(point.value)
        yield point.step, (point.timestamp - row.started) / 1000.0, value if math.isfinite(value) else None


def _pauses(points: Sequence[Point], begins: Sequence[float]) -> list[int]:
    seconds = [second for _, second, _ in points]
    return sorted({bisect_left(seconds, begin) for begin in begins} - {0, len(points)})


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Keeps about `most` points: the lowest and the highest of each section, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept = {0, len(points) - 1}
    for number in range(stretches):
        begin, end = (len(points) * n // stretches for n in (number, number + 1))
        finite = [n for n in range(begin, end) if points[n][2] is not None]
        gap = next((n for n in range(begin, end) if points[n][2] is None), None)
        if finite:
            kept |= {min(finite, key=lambda n: points[n][2] or 0.0), max(finite, key=lambda n: points[n][2] or 0.0)}
        if gap is not None:
            kept.add(gap)
    return [points[n] for n in sorted(kept)]
