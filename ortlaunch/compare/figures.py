"""Figures as people read them, the same in every format."""

from __future__ import annotations

from ortlaunch.base.tables import printable
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import Quotient
from ortlaunch.compare.statistics import Interval, Ratio

MISSING = "-"
UNDECIDED = "~"
SUSPECT = "!"


def word(value: str | bool | None) -> str:
    """A text of the store's, or yes and no."""
    if isinstance(value, bool):
        return str(value).lower()
    return MISSING if value is None else printable(value)


def formatted(value: float | None, spec: str) -> str:
    """A number, or the sign for none."""
    return MISSING if value is None else f"{value:{spec}}"


def rate(value: float | None) -> str:
    """Tokens or samples per second."""
    return formatted(value, ",.0f" if value is not None and abs(value) >= 1000 else ".4g")


def gib(value: float | None) -> str:
    """Memory."""
    return formatted(value, ".2f")


def milliseconds(seconds: float | None) -> str:
    """The time of a step."""
    if seconds is None:
        return MISSING
    return formatted(seconds * 1000, ",.0f" if seconds >= 1 else ".1f")


def ratio(value: Ratio | Quotient | None) -> str:
    """A ratio to the baseline, marked where its interval contains 1."""
    if value is None:
        return MISSING
    return f"{value.ratio:.2f}x" + (UNDECIDED if isinstance(value, Ratio) and value.undecided else "")


def interval(bounds: Interval | None, spec: str = ".2f") -> str:
    """Both ends; the sign for none where there is no interval."""
    return MISSING if bounds is None else f"{bounds[0]:{spec}} to {bounds[1]:{spec}}"


def rate_interval(group: Group, metric: str) -> str:
    """The interval of a group's mean rate, or why there is none."""
    mean = group.mean(metric)
    if mean is None:
        return MISSING
    if mean.interval is None:
        return "1 run"
    return interval(mean.interval, ",.0f" if mean.mean >= 1000 else ".4g")


def group_name(group: Group) -> str:
    """A group's name, marked where a run of it asked for ONNX Runtime and does not show that it got it."""
    return printable(group.label) + (f" {SUSPECT}" if any(row.suspect for row in group.rows) else "")
