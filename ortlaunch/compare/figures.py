"""Formats figures for people, in the same way for every output format."""

from __future__ import annotations

from ortlaunch.base.text import public_text
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import Quotient
from ortlaunch.compare.statistics import Interval, Ratio

MISSING = "-"
UNDECIDED = "~"
SUSPECT = "!"


def word(value: str | bool | None) -> str:
    """Formats a text of the store, or a boolean."""
    if isinstance(value, bool):
        return str(value).lower()
    return MISSING if value is None else public_text(value)


def formatted(value: float | None, spec: str) -> str:
    """Formats a number; a missing one becomes `MISSING`."""
    return MISSING if value is None else f"{value:{spec}}"


def rate(value: float | None) -> str:
    """Formats tokens or samples per second."""
    return formatted(value, ",.0f" if value is not None and abs(value) >= 1000 else ".4g")


def gib(value: float | None) -> str:
    """Formats an amount of memory."""
    return formatted(value, ".2f")


def milliseconds(seconds: float | None) -> str:
    """Formats the duration of a step."""
    if seconds is None:
        return MISSING
    return formatted(seconds * 1000, ",.0f" if seconds >= 1 else ".1f")


def ratio(value: Ratio | Quotient | None) -> str:
    """Formats a ratio to the baseline, and marks it if its interval contains 1."""
    if value is None:
        return MISSING
    return f"{value.ratio:.2f}x" + (UNDECIDED if isinstance(value, Ratio) and value.undecided else "")


def interval(bounds: Interval | None, spec: str = ".2f") -> str:
    """Formats both ends; a missing interval becomes `MISSING`."""
    return MISSING if bounds is None else f"{bounds[0]:{spec}} to {bounds[1]:{spec}}"


def rate_interval(group: Group, metric: str) -> str:
    """Formats the interval of a group's mean rate, or says why there is none."""
    mean = group.mean(metric)
    if mean is None:
        return MISSING
    if mean.interval is None:
        return "1 run"
    return interval(mean.interval, ",.0f" if mean.mean >= 1000 else ".4g")


def group_name(group: Group) -> str:
    """Returns a group's name, with a mark if any of its runs may not have used ONNX Runtime although it should."""
    return public_text(group.label) + (f" {SUSPECT}" if any(row.suspect for row in group.rows) else "")
