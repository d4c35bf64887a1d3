"""The comparison of `ortlaunch compare` as data, for a page that draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ortlaunch.compare.comparison import compared
from ortlaunch.compare.curves import LIMIT, read_curves
from ortlaunch.compare.page import plot_data, tables_of
from ortlaunch.compare.runs import of_folder
from ortlaunch.compare.sources import Sources
from ortlaunch.run.names import RUN_ID_TAG


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Compares runs by their journals.

    Args:
        request: ``run_dirs``.

    Returns:
        ``title``, ``facts``, ``warnings``, ``columns``, ``rows``, ``doubtful``, ``each``, ``differences`` and
        ``curves``.

    Raises:
        RequestError: a journal cannot be read.
    """
    found = [of_folder(Path(one)) for one in request["run_dirs"]]
    # All other pages show runs by ortlaunch's short ids.
    rows = [replace(row, own_id=row.tags[RUN_ID_TAG]) for row in found]
    comparison = compared(rows, rows[0].run_id, why="the first run that was named")
    curves = plot_data(read_curves(Sources(), comparison, LIMIT))
    return {**tables_of(comparison, has_options=False), "curves": curves}
