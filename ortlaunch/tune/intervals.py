"""Intervals of speeds that were measured in rounds. All values are logarithms of scores."""

from __future__ import annotations

import math
import statistics

Interval = tuple[float, float]

LEAST_ROUNDS = 3
"""With fewer values there is no interval."""
_SURE = 0.995
"""Quantile of Student's distribution for intervals in the rounds. It is beyond the usual 0.975, because the intervals
are looked at after every round."""


def _half_width(values: list[float]) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, _SURE)) * math.sqrt(statistics.variance(values) / len(values))


def difference_of(left: list[float], right: list[float]) -> Interval:
    """The interval of the mean of left - right, round by round, so that what changes both counts for nothing."""
    apart = [one - other for one, other in zip(left, right, strict=True)]
    middle, half = statistics.fmean(apart), _half_width(apart)
    return middle - half, middle + half


def interval_of(logs: list[float]) -> Interval | None:
    """The interval of the mean of scores, from their logarithms; None for less than `LEAST_ROUNDS`."""
    if len(logs) < LEAST_ROUNDS:
        return None
    middle, half = statistics.fmean(logs), _half_width(logs)
    return math.exp(middle - half), math.exp(middle + half)


def slower_by(difference: float) -> str:
    """How much slower something is by a difference of logarithms."""
    return f"{1 - math.exp(-difference):.1%}"
