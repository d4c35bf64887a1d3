"""The columns of a comparison, one row for each group, and the lines below them: the same in every output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from ortlaunch.base.text import counted, public_text
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.figures import MISSING, SUSPECT, UNDECIDED, Figure, formatted, milliseconds, rate, word
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import MEMORY, RATES
from ortlaunch.compare.statistics import Change, Interval, Ratio

OTHER_BASELINE = "; another by --baseline RUN"
_FOLDED_WIDTH = 10
_LISTED = 3
_MANY_VALUES = 6
Cell = Callable[[Group], str]


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
        return self.title.replace("-\n", "-").replace("/\n", "/").replace("\n", " ")


def lines(columns: list[Column]) -> Iterator[tuple[str, ...]]:
    """Yields the cells row by row."""
    return zip(*(column.values for column in columns), strict=True)


def columns_of(groups: list[Group], named: Sequence[Figure]) -> list[Column]:
    """Returns the columns of the table. Intervals are shown where a group has several runs, else more of each run.

    Args:
        groups: the rows.
        named: the figures that the user named.
    """
    repeats = any(len(group.rows) > 1 for group in groups)

    def texts(title: str, of: Callable[[Group], str | bool | None], *, folds: bool = False) -> Column:
        return Column(title, [word(of(group)) for group in groups], folds=folds)

    def numbers(title: str, of: Callable[[Group], str]) -> Column:
        return Column(title, [of(group) for group in groups], numeric=True)

    of_run = [
        texts("id", lambda group: group.first.short_id),
        texts("model", lambda group: group.first.model, folds=True),
        texts("backend", lambda group: group.first.backend),
    ]
    known = [
        Column("group" if repeats else "run", [_name(group, repeats=repeats) for group in groups], folds=True),
        *([numbers("runs", lambda group: str(len(group.rows)))] if repeats else of_run),
        texts("ort\nactive", lambda group: group.first.ort_active),
        *([] if repeats else [texts("trainer", lambda group: group.first.trainer, folds=True)]),
        numbers("world\nsize", lambda group: word(group.first.tags.get("ortlaunch.world_size"))),
        texts("status", lambda group: group.status, folds=repeats),
    ]
    measured: list[Column] = []
    for title, value, interval in _measured(groups, named, repeats=repeats):
        measured.append(numbers(title, value))
        if repeats and interval is not None:
            measured.append(numbers("95 %\ninterval", interval))
    return [*known, *(column for column in measured if set(column.values) != {MISSING})]


def _measured(
    groups: list[Group], named: Sequence[Figure], *, repeats: bool
) -> Iterator[tuple[str, Cell, Cell | None]]:
    """Yields the title of each figure's column, its cell, and that of its interval."""
    tokens, samples = RATES
    yield "tokens\n/s", lambda group: rate(group.value(tokens)), lambda group: _interval(group, tokens)
    if any(group.mean(tokens) is None for group in groups):
        yield "samples\n/s", lambda group: rate(group.value(samples)), lambda group: _interval(group, samples)
    yield "speed-\nup", lambda group: _ratio(group.speedup), lambda group: _bounds(group, group.speedup)
    if not repeats:
        yield "p50\nms", lambda group: milliseconds(group.value("summary/step_seconds_p50")), None
        yield "p95\nms", lambda group: milliseconds(group.value("summary/step_seconds_p95")), None
    yield "peak\nGiB", lambda group: formatted(group.value(MEMORY), ".2f"), None
    yield "memory\nratio", lambda group: _ratio(group.memory), lambda group: _bounds(group, group.memory)
    yield "last\nloss", lambda group: formatted(group.loss), None
    for one in named:
        yield from _named(one)


def _named(figure: Figure) -> Iterator[tuple[str, Cell, Cell | None]]:
    def change(group: Group) -> str:
        found = group.change(figure.metric)
        if found is None or group.is_baseline:
            return MISSING
        verdict = f" {said}" if (said := found.verdict(figure.better)) else ""
        return f"{found.difference:+.3g}{UNDECIDED if found.undecided else ''}{verdict}"

    title = public_text(figure.metric).replace("/", "/\n", 1)
    yield title, lambda group: formatted(group.value(figure.metric)), lambda group: _interval(group, figure.metric)
    yield "change", change, lambda group: _bounds(group, group.change(figure.metric))


def _name(group: Group, *, repeats: bool) -> str:
    name = public_text(group.label if repeats else group.first.name)
    return f"{name} {SUSPECT}" if any(row.suspect for row in group.rows) else name


def _ratio(ratio: Ratio | None) -> str:
    return MISSING if ratio is None else f"{ratio.ratio:.2f}x{UNDECIDED if ratio.undecided else ''}"


def _bounds(group: Group, found: Ratio | Change | None) -> str:
    if found is None or group.is_baseline:
        return MISSING
    return _from_to(found.interval, ".2f" if isinstance(found, Ratio) else ".3g")


def _interval(group: Group, metric: str) -> str:
    mean = group.mean(metric)
    return MISSING if mean is None else _from_to(mean.interval, ",.0f" if abs(mean.mean) >= 1000 else ".4g")


def _from_to(interval: Interval | None, spec: str) -> str:
    return "1 run" if interval is None else f"{interval[0]:{spec}} to {interval[1]:{spec}}"


def footnotes(comparison: Comparison) -> list[str]:
    """Returns the lines below the table: what the ratios refer to, why this is the baseline, and remarks."""
    base = comparison.baseline
    name = base.label if comparison.has_repeats else f"{base.first.name} ({base.first.short_id})"
    return [f"speed-up and memory against {name}; {_repeats(comparison)}", *_reason(comparison), *comparison.notes]


def _reason(comparison: Comparison) -> list[str]:
    has_choice = comparison.why and len(comparison.rows) > 1
    return [f"baseline: {comparison.why}{OTHER_BASELINE}"] if has_choice else []


def _repeats(comparison: Comparison) -> str:
    """Says what the intervals are, or why there are none."""
    if not comparison.has_repeats:
        return "1 run of each: no intervals (repeat runs with other seeds, or: ortlaunch bench repeat=3)"
    found = [one for group in comparison.groups for one in (group.speedup, group.memory, *_changes(comparison, group))]
    undecided = any(one is not None and one.undecided for one in found)
    return f"means of repeats with 95 % intervals{f'; {UNDECIDED} no difference is shown' if undecided else ''}"


def _changes(comparison: Comparison, group: Group) -> list[Change | None]:
    return [group.change(figure.metric) for figure in comparison.figures]


def difference_columns(comparison: Comparison) -> list[Column]:
    """Returns a row for each value of each difference, with the groups that have it."""
    labels = [public_text(group.label) for group in comparison.groups]
    keys, values, who = [], [], []
    for difference in comparison.differences:
        found = difference.by_value(labels)
        for number, (value, having) in enumerate(found[:_MANY_VALUES]):
            keys.append("" if number else public_text(difference.key))
            values.append(word(value))
            more = len(having) - _LISTED
            who.append(", ".join(having[:_LISTED]) + (f" and {more} more" if more > 0 else ""))
        if len(found) > _MANY_VALUES:
            keys.append("")
            values.append(f"and {counted(len(found) - _MANY_VALUES, 'more value')}")
            who.append("")
    return [Column("differs", keys), Column("value", values, folds=True), Column("of", who, folds=True)]
