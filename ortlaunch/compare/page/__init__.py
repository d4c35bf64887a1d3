"""Renders a comparison as one HTML page with table, curves, differences and warnings; it needs no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from ortlaunch.base.text import counted, public_text
from ortlaunch.compare.columns import OTHER_BASELINE, Column, columns_of, difference_columns, footnotes, lines
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.curves import TITLES, Curve, Curves
from ortlaunch.compare.groups import Group

TEMPLATES = Path(__file__).parent / "templates"
_FROM_ZERO = ("throughput/", "memory/")


def as_html(comparison: Comparison, curves: Curves) -> str:
    """Returns the HTML page.

    Args:
        comparison: the tables.
        curves: the curves to draw.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: public_text(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    # A module, because that is what the service loads these scripts as; here they are one.
    own = "".join(map(_script, ("shared/element.js", "shared/numbers.js", "shared/plot.js", "page.js")))
    scripts = f'<script>{_asset("uplot/uPlot.iife.min.js")}</script>\n<script type="module">\n{own}</script>'
    return environment.get_template("page.html").render(
        comparison=tables_of(comparison),
        baseline=comparison.baseline.label,
        uri=comparison.uri,
        url=comparison.url,
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        curves=plot_data(curves),
        left_out=curves.left_out,
        resumed=any(curve.pauses for curve in curves.curves),
        styles=Markup(_asset("uplot/uPlot.min.css") + _asset("page.css")),
        scripts=Markup(scripts),
    )


def tables_of(comparison: Comparison, *, has_options: bool = True) -> dict[str, Any]:
    """Returns what `tables.html` shows of a comparison.

    Args:
        comparison: the comparison.
        has_options: whether the reader can make it again with the command's options.
    """
    facts = [fact if has_options else fact.removesuffix(OTHER_BASELINE) for fact in footnotes(comparison)]
    return {
        "title": f"Comparison of {counted(len(comparison.rows), 'run')}",
        "facts": [public_text(fact) for fact in facts],
        "warnings": [public_text(warning) for warning in comparison.warnings],
        **_groups(comparison, comparison.groups),
        "each": _groups(comparison, comparison.each if comparison.has_repeats else []),
        "differences": _table(difference_columns(comparison)),
    }


def _groups(comparison: Comparison, groups: list[Group]) -> dict[str, Any]:
    columns = columns_of(groups, comparison.figures) if groups else []
    return {**_table(columns), "doubtful": [group.is_doubtful for group in groups]}


def _table(columns: Sequence[Column]) -> dict[str, Any]:
    return {
        "columns": [{"title": column.heading, "numeric": column.numeric} for column in columns],
        "rows": [[public_text(cell) for cell in row] for row in lines(list(columns))] if columns else [],
    }


def plot_data(curves: Curves) -> dict[str, Any]:
    """Returns the runs that are drawn and their curves, as the page's script takes them."""
    runs = []
    for group, members in groupby(curves.runs, key=lambda drawn: drawn.group):
        runs += [{"label": one.label, "group": group, "repeat": number} for number, one in enumerate(members)]
    plots = [
        {
            "title": public_text(TITLES.get(metric, metric)),
            "fromZero": metric.startswith(_FROM_ZERO),
            "curves": [_curve(curve) for curve in curves.curves if curve.metric == metric],
        }
        for metric in curves.metrics
    ]
    return {"runs": runs, "plots": plots}


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.run,
        "steps": [step for step, _, _ in curve.points],
        "seconds": [round(seconds, 3) for _, seconds, _ in curve.points],
        "pauses": curve.pauses,
        "values": [value if value is None else float(f"{value:.6g}") for _, _, value in curve.points],
    }


def _script(name: str) -> str:
    """Returns a script without its imports, which are in the same module here."""
    return "".join(line for line in _asset(name).splitlines(keepends=True) if not line.startswith("import "))


def _asset(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
