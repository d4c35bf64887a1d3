"""Intervals of speeds that were measured in rounds. All values are logarithms of scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

Interval = tuple[float, float]

T = TypeVar("T")

LEAST_ROUNDS = 3
"""With fewer values there is no interval."""
_SURE = 0.995
"""Quantile of Student's distribution for intervals in the rounds. It is beyond the usual 0.975, because the intervals
are looked at after every round."""


def difference_of(left: T, right: T, rounds: Mapping[T, Sequence[float]]) -> Interval:
    """The interval of the mean of left - right over all rounds.

    What changes all values of a round counts for nothing. The noise is that of all that were measured in these rounds,
    so that few rounds tell more than those of two alone.

    Args:
        left: one of `rounds`.
        right: another one.
        rounds: the values of each, one for each round.
    """
    count, length = len(rounds), len(rounds[left])
    of_round = [statistics.fmean(values) for values in zip(*rounds.values(), strict=True)]
    apart = {
        name: [value - mean for value, mean in zip(values, of_round, strict=True)] for name, values in rounds.items()
    }
    freedom = (count - 1) * (length - 1)
    variance = sum((length - 1) * statistics.variance(values) for values in apart.values()) / freedom
    middle = statistics.fmean(apart[left]) - statistics.fmean(apart[right])
    half = _quantile(freedom) * math.sqrt(2 * variance / length)
    return middle - half, middle + half


def interval_of(logs: list[float]) -> Interval | None:
    """The interval of the mean of scores, from their logarithms; None for less than `LEAST_ROUNDS`."""
    if len(logs) < LEAST_ROUNDS:
        return None
    middle, half = statistics.fmean(logs), _quantile(len(logs) - 1) * math.sqrt(statistics.variance(logs) / len(logs))
    return math.exp(middle - half), math.exp(middle + half)


def _quantile(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, _SURE))


def slower_by(difference: float) -> str:
    """How much slower something is by a difference of logarithms."""
    return f"{1 - math.exp(-difference):.1%}"
