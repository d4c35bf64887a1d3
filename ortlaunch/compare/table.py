"""Prints a comparison as a table for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.tables import print_in_full_width
from ortlaunch.base.text import counted, public_text
from ortlaunch.compare import figures
from ortlaunch.compare.columns import Column, columns_of, doubtful, lines
from ortlaunch.compare.comparison import Comparison

OTHER_BASELINE = "; another by --baseline RUN"
_LISTED = 3
_MANY_VALUES = 6


def print_table(comparison: Comparison, console: Console, *, each: bool = False) -> None:
    """Prints the runs or groups, the differences of their configurations, and the warnings.

    Args:
        comparison: the comparison to print.
        console: where to print; output that is no terminal is not coloured, wrapped or cut.
        each: whether repeats get a row each.
    """
    columns = columns_of(comparison, each=each)
    table = _table(columns)
    for cells, doubt in zip(lines(columns), doubtful(comparison, each=each), strict=True):
        table.add_row(*(Text(cell) for cell in cells), style="yellow" if doubt else "")
    _print(table, columns, console)
    for line in footnotes(comparison, each=each):
        console.print(Text(line), soft_wrap=not console.is_terminal)
    if comparison.differences:
        console.print()
        columns = difference_columns(comparison)
        table = _table(columns)
        for cells in lines(columns):
            table.add_row(*(Text(cell) for cell in cells))
        _print(table, columns, console)


def _table(columns: list[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="right" if column.numeric else "left",
            no_wrap=not column.folds,
            overflow="fold",
            min_width=column.least_width,
        )
    return table


def _print(table: Table, columns: list[Column], console: Console) -> None:
    if console.is_terminal and sum(column.least_width + 1 for column in columns) <= console.width:
        console.print(table)
    else:
        print_in_full_width(table, console)


def footnotes(comparison: Comparison, *, each: bool) -> list[str]:
    """Returns the lines below the table: what the ratios refer to, and the warnings."""
    listed = [f"{baseline_line(comparison, each=each)}; {repeats_line(comparison, each=each)}"]
    listed += reason_lines(comparison)
    listed += [public_text(note) for note in comparison.notes]
    if comparison.url:
        listed.append(f"in MLflow: {comparison.url}")
    return [*listed, *(f"{figures.SUSPECT} {public_text(warning)}" for warning in comparison.warnings)]


def baseline_line(comparison: Comparison, *, each: bool) -> str:
    """Says what the ratios refer to."""
    base = next(row for row in comparison.rows if row.run_id == comparison.baseline_id)
    if each or not comparison.has_repeats:
        return f"speed-up and memory against {public_text(base.name)} ({public_text(base.short_id)})"
    return f"speed-up and memory against {public_text(comparison.baseline.label)}"


def reason_lines(comparison: Comparison) -> list[str]:
    """Says why this is the baseline and how to choose another; empty if the user named it or there is no other."""
    has_choice = comparison.why and len(comparison.rows) > 1
    return [f"baseline: {public_text(comparison.why)}{OTHER_BASELINE}"] if has_choice else []


def repeats_line(comparison: Comparison, *, each: bool) -> str:
    """Says what the intervals are, or why there are none."""
    if not comparison.has_repeats:
        return "1 run of each: no intervals (repeat runs with other seeds, or: ortlaunch bench repeat=3)"
    if each:
        return "single runs have no intervals; their groups of repeats do, without --each"
    mark = f"; {figures.UNDECIDED} 1 is in it: no difference is shown" if comparison.has_undecided else ""
    return f"means of repeats with 95 % intervals{mark}"


def difference_columns(comparison: Comparison) -> list[Column]:
    """Returns a row for each value of each difference, with the groups that have it."""
    labels = [public_text(group.label) for group in comparison.groups]
    keys, values, who = [], [], []
    for difference in comparison.differences:
        found = difference.by_value(labels)
        for number, (value, having) in enumerate(found[:_MANY_VALUES]):
            keys.append("" if number else public_text(difference.key))
            values.append(figures.word(value))
            who.append(_listed(having))
        if len(found) > _MANY_VALUES:
            keys.append("")
            values.append(f"and {counted(len(found) - _MANY_VALUES, 'more value')}")
            who.append("")
    return [Column("differs", keys), Column("value", values, folds=True), Column("of", who, folds=True)]


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
