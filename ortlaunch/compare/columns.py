"""The columns of a comparison: one row for each run, or for each group of repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len

from ortlaunch.compare import figures
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.figures import formatted, gib, milliseconds, rate, ratio, word
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import MEMORY, RATES, RunRow
from ortlaunch.compare.statistics import Ratio

_FOLDED_WIDTH = 10


@dataclass(frozen=True)
class Column:
    """A title of one or two lines, and the cells below it."""

    title: str
    values: list[str]
    numeric: bool = False
    folds: bool = False
    """Whether a narrow terminal may wrap the values."""

    @property
    def least_width(self) -> int:
        """The smallest width in which the column can be shown."""
        width = max(cell_len(text) for text in (*self.title.split("\n"), *self.values))
        return min(width, _FOLDED_WIDTH) if self.folds else width

    @property
    def heading(self) -> str:
        """The title on one line."""
        return self.title.replace("-\n", "-").replace("\n", " ")


def columns_of(comparison: Comparison, *, each: bool) -> list[Column]:
    """Returns the columns of the table.

    Args:
        comparison: the comparison to show.
        each: whether repeats get a row each.
    """
    if each or not comparison.has_repeats:
        return _of_runs(comparison.rows)
    return _of_groups(comparison.groups)


def lines(columns: list[Column]) -> Iterator[tuple[str, ...]]:
    """Yields the cells row by row."""
    return zip(*(column.values for column in columns), strict=True)


def doubtful(comparison: Comparison, *, each: bool) -> list[bool]:
    """Whether each row needs a warning colour: the run did not finish, or ONNX Runtime may not have run it."""
    if each or not comparison.has_repeats:
        return [_is_doubtful(row) for row in comparison.rows]
    return [any(_is_doubtful(row) for row in group.rows) for group in comparison.groups]


def _is_doubtful(row: RunRow) -> bool:
    return row.suspect or row.status != "FINISHED"


def _of_runs(rows: list[RunRow]) -> list[Column]:
    names = [word(row.name) + (f" {figures.SUSPECT}" if row.suspect else "") for row in rows]
    columns = [
        Column("run", names, folds=True),
        Column("id", [word(row.short_id) for row in rows]),
        Column("model", [word(row.model) for row in rows], folds=True),
        Column("backend", [word(row.backend) for row in rows]),
        Column("ort\nactive", [word(row.ort_active) for row in rows]),
        Column("trainer", [word(row.trainer) for row in rows], folds=True),
        Column("world\nsize", [word(row.world_size) for row in rows], numeric=True),
        Column("status", [word(row.status) for row in rows]),
    ]
    has_tokens, has_samples = _shown_rates([row.tokens_per_second_median for row in rows], _samples(rows))
    if has_tokens:
        columns.append(Column("tokens\n/s", [rate(row.tokens_per_second_median) for row in rows], numeric=True))
    if has_samples:
        columns.append(Column("samples\n/s", [rate(row.samples_per_second_median) for row in rows], numeric=True))
    return [
        *columns,
        Column("speed-\nup", [ratio(row.speedup) for row in rows], numeric=True),
        Column("p50\nms", [milliseconds(row.step_seconds_p50) for row in rows], numeric=True),
        Column("p95\nms", [milliseconds(row.step_seconds_p95) for row in rows], numeric=True),
        Column("peak\nGiB", [gib(row.peak_memory_gib) for row in rows], numeric=True),
        Column("memory\nratio", [ratio(row.memory) for row in rows], numeric=True),
        Column("last\nloss", [formatted(row.last_loss, ".4g") for row in rows], numeric=True),
    ]


def _samples(rows: list[RunRow]) -> list[float | None]:
    """Returns the sample rates of runs without a token rate."""
    return [None if row.tokens_per_second_median is not None else row.samples_per_second_median for row in rows]


def _shown_rates(tokens: list[float | None], samples: list[float | None]) -> tuple[bool, bool]:
    """Whether the tokens and the samples column are needed."""
    has_samples = any(value is not None for value in samples)
    return any(value is not None for value in tokens) or not has_samples, has_samples


def _of_groups(groups: list[Group]) -> list[Column]:
    columns = [
        Column("group", [figures.group_name(group) for group in groups], folds=True),
        Column("runs", [str(len(group.rows)) for group in groups], numeric=True),
        Column("ort\nactive", [word(group.first.ort_active) for group in groups]),
        Column("world\nsize", [word(group.first.world_size) for group in groups], numeric=True),
        Column("status", [word(group.status) for group in groups], folds=True),
    ]
    tokens = [group.value(RATES[0]) for group in groups]
    samples = [None if group.tokens is not None else group.value(RATES[1]) for group in groups]
    has_tokens, has_samples = _shown_rates(tokens, samples)
    if has_tokens:
        columns += _rate_columns("tokens\n/s", tokens, [figures.rate_interval(group, RATES[0]) for group in groups])
    if has_samples:
        intervals = [
            figures.MISSING if value is None else figures.rate_interval(group, RATES[1])
            for group, value in zip(groups, samples, strict=True)
        ]
        columns += _rate_columns("samples\n/s", samples, intervals)
    return [
        *columns,
        Column("speed-\nup", [ratio(group.speedup) for group in groups], numeric=True),
        Column("95 %\ninterval", [_bounds(group.speedup, group) for group in groups], numeric=True),
        Column("peak\nGiB", [gib(group.value(MEMORY)) for group in groups], numeric=True),
        Column("memory\nratio", [ratio(group.memory) for group in groups], numeric=True),
        Column("95 %\ninterval", [_bounds(group.memory, group) for group in groups], numeric=True),
        Column("last\nloss", [formatted(mean_loss(group), ".4g") for group in groups], numeric=True),
    ]


def _rate_columns(title: str, means: list[float | None], intervals: list[str]) -> list[Column]:
    return [
        Column(title, [rate(mean) for mean in means], numeric=True),
        Column("95 %\ninterval", intervals, numeric=True),
    ]


def _bounds(value: Ratio | None, group: Group) -> str:
    if group.is_baseline or value is None:
        return figures.MISSING
    return "1 run" if value.interval is None else figures.interval(value.interval)


def mean_loss(group: Group) -> float | None:
    """Returns the mean of the last losses; if some runs finished, the others are left out, as they ended earlier."""
    finished = [row for row in group.rows if row.status == "FINISHED"]
    losses = [row.last_loss for row in finished or group.rows if row.last_loss is not None]
    return math.fsum(losses) / len(losses) if losses else None
