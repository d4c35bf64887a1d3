"""Printing a comparison in the format that was asked for."""

from __future__ import annotations

from rich.console import Console

from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.table import print_table
from ortlaunch.compare.text import as_csv, as_json, as_markdown


def render(comparison: Comparison, format: str, console: Console, *, each: bool = False) -> None:
    """Prints a comparison.

    Args:
        comparison: What to print.
        format: table, json, csv or markdown. json has the exact values behind each ratio.
        console: Where to print; if it is no terminal, nothing is coloured, wrapped or cut.
        each: A line for each run, though some are repeats of each other.
    """
    if format == "table":
        print_table(comparison, console, each=each)
        return
    if format == "markdown":
        text = as_markdown(comparison, each=each)
    else:
        text = as_json(comparison) if format == "json" else as_csv(comparison)
    console.out(text, end="", highlight=False)
