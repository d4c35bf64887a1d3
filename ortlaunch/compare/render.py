"""Prints a comparison in the requested format."""

from __future__ import annotations

from rich.console import Console

from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.table import print_table
from ortlaunch.compare.text import as_csv, as_json, as_markdown


def render(comparison: Comparison, format: str, console: Console, *, each: bool = False) -> None:
    """Prints a comparison.

    Args:
        comparison: the comparison to print.
        format: table, json, csv or markdown; json contains the exact values of each ratio.
        console: where to print; output that is no terminal is not coloured, wrapped or cut.
        each: whether repeats get a row each.
    """
    if format == "table":
        print_table(comparison, console, each=each)
        return
    if format == "markdown":
        text = as_markdown(comparison, each=each)
    else:
        text = as_json(comparison) if format == "json" else as_csv(comparison)
    console.out(text, end="", highlight=False)
