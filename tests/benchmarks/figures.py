"""Medians and ratios with an interval, for the tables of benchmarks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

_DRAWS = 2000
T = TypeVar("T")


def with_interval(ratios: Sequence[float]) -> str:
    """The median and the 95 % interval of the median, by resampling."""
    return _resampled(ratios, statistics.median)


def ratio_with_interval(pairs: Sequence[tuple[float, float]]) -> str:
    """The sum of the first of all pairs over that of the second, and its 95 % interval, by resampling pairs.

    What comes in a few of the pairs alone counts here with its share; a median of ratios leaves it out.
    """
    return _resampled(pairs, lambda some: sum(first for first, _ in some) / sum(second for _, second in some))


def _resampled(values: Sequence[T], figure: Callable[[Sequence[T]], float]) -> str:
    chance = random.Random(0)
    drawn = sorted(figure(chance.choices(values, k=len(values))) for _ in range(_DRAWS))
    low, high = drawn[_DRAWS // 40], drawn[-_DRAWS // 40 - 1]
    return f"{figure(values):.3f} ({low:.3f} to {high:.3f})"


def with_range(values: Sequence[float], digits: int = 2) -> str:
    """The median of a few rounds, with the least and the largest in brackets."""
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"
