"""Medians with an interval, for the tables of benchmarks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

_DRAWS = 2000


def with_interval(ratios: Sequence[float]) -> str:
    """The median and the 95 % interval of the median, by resampling."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    low, high = medians[_DRAWS // 40], medians[-_DRAWS // 40 - 1]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def with_range(values: Sequence[float], digits: int = 2) -> str:
    """The median of a few rounds, with the least and the largest in brackets."""
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"
