"""Renders a comparison as one HTML page with table, curves, differences and warnings; it needs no network."""

from __future__ import annotations

import json
import time
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from ortlaunch.base.text import counted, public_text
from ortlaunch.compare import figures
from ortlaunch.compare.columns import Column, columns_of, doubtful, lines
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.curves import TITLES, Curves
from ortlaunch.compare.table import baseline_line, difference_columns, reason_lines, repeats_line

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The browser enforces that the page loads nothing."""
_MATRIX = 12
"""Number of groups up to which the differences have a column for each group."""
_FROM_ZERO = ("throughput/", "memory/")


def as_html(comparison: Comparison, curves: Curves) -> str:
    """Returns the HTML page.

    Args:
        comparison: the tables.
        curves: the curves to draw.
    """
    title = f"Comparison of {counted(len(comparison.rows), 'run')}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n',
        f"<title>{title}: {_text(comparison.baseline.label)}</title>\n",
        f"<style>\n{_asset('uplot/uPlot.min.css')}\n{_asset('page.css')}</style>\n</head>\n<body>\n",
        f"<h1>{title}</h1>\n",
        *_head(comparison),
        *_warnings(comparison),
        *_tables(comparison),
        *_plots(curves),
        *_differences(comparison),
        "</body>\n</html>\n",
    ]
    return "".join(parts)


def _head(comparison: Comparison) -> list[str]:
    made = time.strftime("%Y-%m-%d %H:%M %Z")
    each = not comparison.has_repeats
    facts = [baseline_line(comparison, each=each), *reason_lines(comparison), repeats_line(comparison, each=each)]
    facts += comparison.notes
    found = [f'<p class="faint">{_text(fact)}</p>\n' for fact in facts]
    link = f' · <a href="{escape(comparison.url)}">the same runs in MLflow</a>' if comparison.url else ""
    return [*found, f'<p class="faint">from {_text(comparison.uri)}, {made}{link}</p>\n']


def _warnings(comparison: Comparison) -> list[str]:
    if not comparison.warnings:
        return []
    items = "".join(f"<li>{_text(warning)}</li>\n" for warning in comparison.warnings)
    return [f'<ul class="warnings">\n{items}</ul>\n']


def _tables(comparison: Comparison) -> list[str]:
    marks = doubtful(comparison, each=False)
    parts = [_table(columns_of(comparison, each=False), marks)]
    if comparison.has_repeats:
        inner = _table(columns_of(comparison, each=True), doubtful(comparison, each=True))
        parts.append(f"<details><summary>each of the {len(comparison.rows)} runs</summary>\n{inner}</details>\n")
    return parts


def _table(columns: list[Column], marks: list[bool]) -> str:
    kinds = [' class="number"' if column.numeric else "" for column in columns]
    heads = "".join(f"<th{kind}>{_text(column.heading)}</th>" for column, kind in zip(columns, kinds, strict=True))
    body = []
    for cells, mark in zip(lines(columns), marks, strict=True):
        row = "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(cells, kinds, strict=True))
        body.append(f"<tr{' class=doubtful' if mark else ''}>{row}</tr>\n")
    return (
        f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{"".join(body)}</tbody></table></div>\n'
    )


def _plots(curves: Curves) -> list[str]:
    if not curves.curves:
        return ['<h2>Curves</h2>\n<p class="faint">No run has a history of throughput, memory or loss.</p>\n']
    left = f"Not drawn: {counted(curves.left_out, 'run')} (--curves N draws more). " if curves.left_out else ""
    resumed = any(curve.pauses for curve in curves.curves)
    broken = " Over time, a line is broken where a run had ended and was resumed." if resumed else ""
    hint = f"{left}Drag to zoom, double-click to see all again.{broken}"
    return [
        f'<h2>Curves</h2>\n<p class="faint">{hint}</p>\n<div id="runs"></div>\n',
        '<div id="plots" class="plots"></div>\n',
        f'<script type="application/json" id="curves">{_data(curves)}</script>\n',
        f"<script>{_asset('uplot/uPlot.iife.min.js')}</script>\n",
        # A module, because that is what the service loads numbers.js as.
        f'<script type="module">{_asset("shared/numbers.js")}{_asset("page.js")}</script>\n',
    ]


def _data(curves: Curves) -> str:
    """Returns the curves as JSON in which `<`, `>` and `&` are escaped, so that it cannot end its script element."""
    document = json.dumps(plot_data(curves), separators=(",", ":"), allow_nan=False)
    return document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plot_data(curves: Curves) -> dict[str, Any]:
    """Returns the runs that are drawn and their curves, as the page's script takes them."""
    runs = []
    for group, members in groupby(curves.runs, key=lambda drawn: drawn.group):
        runs += [{"label": one.label, "group": group, "repeat": number} for number, one in enumerate(members)]
    plots = [
        {
            "title": TITLES[metric],
            "fromZero": metric.startswith(_FROM_ZERO),
            "curves": [
                {
                    "run": curve.run,
                    "steps": [step for step, _, _ in curve.points],
                    "seconds": [round(seconds, 3) for _, seconds, _ in curve.points],
                    "pauses": curve.pauses,
                    "values": [value if value is None else float(f"{value:.6g}") for _, _, value in curve.points],
                }
                for curve in curves.of(metric)
            ],
        }
        for metric in curves.metrics
    ]
    return {"runs": runs, "plots": plots}


def _differences(comparison: Comparison) -> list[str]:
    if not comparison.differences:
        return []
    if len(comparison.groups) > _MATRIX:
        columns = difference_columns(comparison)
    else:
        keys = Column("", [public_text(difference.key) for difference in comparison.differences])
        found = [[figures.word(value) for value in difference.values] for difference in comparison.differences]
        by_group = zip(comparison.groups, zip(*found, strict=True), strict=True)
        columns = [keys, *(Column(public_text(group.label), list(values)) for group, values in by_group)]
    return ["<h2>What differs in their configuration</h2>\n", _table(columns, [False] * len(columns[0].values))]


def _text(text: str) -> str:
    return escape(public_text(text))


def _asset(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
