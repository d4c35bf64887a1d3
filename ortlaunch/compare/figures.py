"""Figures of any name: which direction is better, and how numbers are written."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.base.text import public_text
from ortlaunch.compare.runs import RunRow
from ortlaunch.run.state import SCRIPT_TAG

MISSING = "-"
UNDECIDED = "~"
SUSPECT = "!"
_HIGHER = re.compile(
    r"(throughput|summary)/(device/)?(tokens|samples)_per_second(_median)?"
    r"|throughput/(tflops_per_device|mfu_percent)|summary/goodput_percent"
)
_LOWER = re.compile(
    r"(train|eval)/loss|(summary|memory)/\w+_gib|throughput/data_wait_percent"
    r"|(throughput|summary|eval|startup|checkpoint|stragglers)/\w*seconds\w*"
)
_LISTED = 30
_OURS = (
    *("checkpoint/", "goodput/", "memory/", "startup/", "stragglers/", "summary/", "system/", "throughput/"),
    "train/grad_norm",
)
"""Beginnings of what ortlaunch itself journals of a script, also of one that attaches."""
_SHOWN = 4


@dataclass(frozen=True)
class Figure:
    """A metric that is compared besides throughput, memory and loss."""

    metric: str
    better: str | None = None
    """`higher` or `lower`; None if nobody has said."""


def parsed(text: str) -> Figure:
    """Parses the value of `--metric`: a metric's name, with ``:max`` or ``:min`` if more or less of it is better."""
    metric, colon, way = text.rpartition(":")
    if not colon or way not in ("max", "min"):
        better = "higher" if _HIGHER.fullmatch(text) else "lower" if _LOWER.fullmatch(text) else None
        metric = text
    else:
        better = "higher" if way == "max" else "lower"
    if not metric:
        raise argparse.ArgumentTypeError(f"{text!r} names no metric")
    return Figure(metric, better)


def of_scripts(rows: list[RunRow]) -> list[Figure]:
    """Returns the metrics that scripts have logged under names of their own: of many the first, losses foremost."""
    logged = {metric for row in rows if SCRIPT_TAG in row.tags for metric in row.metrics}
    ordered = sorted(logged, key=lambda metric: ("loss" not in metric.lower(), metric))
    return [parsed(metric) for metric in ordered if not metric.startswith(_OURS)][:_SHOWN]


def check(figures: list[Figure], rows: list[RunRow]) -> None:
    """Refuses figures that no run has.

    Raises:
        RequestError: the message names those that the runs have.
    """
    known = sorted({metric for row in rows for metric in row.metrics})
    for figure in figures:
        if figure.metric not in known:
            near = nearest(figure.metric, known)
            hint = f"did you mean {near}? " if near else ""
            more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
            listed = (", ".join(known[:_LISTED]) or "none") + more
            raise RequestError(f"--metric {figure.metric}: no run has this metric. {hint}(metrics: {listed})")


def word(value: str | bool | None) -> str:
    """Formats a text of the store, or a boolean."""
    if isinstance(value, bool):
        return str(value).lower()
    return MISSING if value is None else public_text(value)


def formatted(value: float | None, spec: str = ".4g") -> str:
    """Formats a number; a missing one becomes `MISSING`."""
    return MISSING if value is None else f"{value:{spec}}"


def rate(value: float | None) -> str:
    """Formats tokens or samples per second."""
    return formatted(value, ",.0f" if value is not None and abs(value) >= 1000 else ".4g")


def milliseconds(seconds: float | None) -> str:
    """Formats the duration of a step."""
    return MISSING if seconds is None else f"{seconds * 1000:{',.0f' if seconds >= 1 else '.1f'}}"
