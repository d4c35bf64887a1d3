"""The comparison of `ortlaunch compare` as data, for a page that draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted
from ortlaunch.base.text import counted, public_text
from ortlaunch.compare.choose import Selection, choose
from ortlaunch.compare.columns import Column, columns_of, doubtful, lines
from ortlaunch.compare.comparison import Comparison, compared
from ortlaunch.compare.curves import LIMIT, read_curves
from ortlaunch.compare.page import plot_data
from ortlaunch.compare.reading import opened
from ortlaunch.compare.runs import RunRow
from ortlaunch.compare.table import OTHER_BASELINE, baseline_line, difference_columns, reason_lines, repeats_line
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, default_uri, resolve_tracking, sqlite_path
from ortlaunch.run.key import RunKey


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Compares runs by what MLflow has of them.

    Args:
        request: ``run_dirs``.

    Returns:
        ``title``, ``facts``, ``warnings``, ``columns``, ``rows``, ``doubtful``, ``differences`` and ``curves``.
    """
    runs = request["run_dirs"]
    check_uri(default_uri(), None)
    uri = resolve_tracking(MlflowConfig(uri=default_uri()), Path.cwd()).uri
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise RequestError(f"MLflow has no record of these runs: there is no {database} (see tracking)")
    selection = Selection(runs=runs, sweep=None, tags=[], experiment=None, last=None, baseline=None)
    with opened(uri) as client:
        chosen = choose(client, selection)
        rows = [_with_own_id(row) for row in chosen.rows]
        comparison = compared(rows, chosen.baseline_id, redacted(uri), chosen.notes, chosen.why)
        curves = plot_data(read_curves(client, comparison, LIMIT))
    columns = columns_of(comparison, each=False)
    differences = difference_columns(comparison) if comparison.differences else []
    return {
        "title": f"Comparison of {counted(len(comparison.rows), 'run')}",
        "facts": _facts(comparison),
        "warnings": [public_text(warning) for warning in comparison.warnings],
        **_table(columns),
        "doubtful": doubtful(comparison, each=False),
        "differences": _table(differences),
        "curves": curves,
    }


def _with_own_id(row: RunRow) -> RunRow:
    """The row under the id that the run has in all other pages."""
    run_dir = row.tags.get("ortlaunch.run_dir")
    return row if run_dir is None else replace(row, own_id=RunKey.of_folder(Path(run_dir).name).run_id)


def _facts(comparison: Comparison) -> list[str]:
    each = not comparison.has_repeats
    facts = [baseline_line(comparison, each=each), *reason_lines(comparison), repeats_line(comparison, each=each)]
    # Nobody has options here.
    return [public_text(fact.removesuffix(OTHER_BASELINE)) for fact in (*facts, *comparison.notes)]


def _table(columns: list[Column]) -> dict[str, Any]:
    return {
        "columns": [{"title": column.heading, "numeric": column.numeric} for column in columns],
        "rows": [[public_text(cell) for cell in row] for row in lines(columns)] if columns else [],
    }
