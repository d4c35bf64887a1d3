"""Means of repeated runs, and ratios and differences of two means, with 95 % confidence intervals.

Mean: Student's t. With n values, mean m and sample standard deviation s, the interval is m ± t·s/√n, where t is the
97.5 % point of Student's distribution with n - 1 degrees of freedom. Rates and memory are never negative, so the
interval is cut at 0.

Ratio of two means: Fieller's interval (E. C. Fieller, "Some problems in interval estimation", Journal of the Royal
Statistical Society B 16, 1954), which T. Kalibera and R. Jones ("Rigorous benchmarking in reasonable time", 2013) use
for speed-ups. It holds the ratios r for which (m1 - r·m2)² ≤ t²·(v1 + r²·v2), with v = s²/n of each side. As the
variances may differ, t has Satterthwaite's degrees of freedom at the observed ratio (A. C. Tamhane and B. R. Logan,
Biometrics 60, 2004).

Difference of two means: Welch's interval (B. L. Welch, Biometrika 34, 1947), which holds for values of any sign.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_UPPER = 0.975
Interval = tuple[float, float]


@dataclass(frozen=True)
class Mean:
    """The mean of the values of several runs; a single run has no interval."""

    count: int
    mean: float
    interval: Interval | None
    squared_error: float
    """s²/n, the variance of the mean; 0 for a single value."""


@dataclass(frozen=True)
class Ratio:
    """A group's mean divided by the baseline's, with both means."""

    metric: str
    ratio: float
    value: float
    baseline_value: float
    interval: Interval | None

    @property
    def undecided(self) -> bool:
        """Whether the interval contains 1, so that these runs show no difference."""
        return self.interval is not None and self.interval[0] <= 1.0 <= self.interval[1]


@dataclass(frozen=True)
class Change:
    """A group's mean minus the baseline's, with both means."""

    metric: str
    difference: float
    value: float
    baseline_value: float
    interval: Interval | None

    @property
    def undecided(self) -> bool:
        """Whether the interval contains 0, so that these runs show no difference."""
        return self.interval is not None and self.interval[0] <= 0.0 <= self.interval[1]

    def verdict(self, better: str | None) -> str | None:
        """Returns `better` or `worse`; None if that is not known, or the runs show no difference.

        Args:
            better: the direction that is better, `higher` or `lower`.
        """
        if better is None or self.interval is None or self.undecided:
            return None
        return "better" if (self.difference > 0) is (better == "higher") else "worse"


def mean_of(values: Sequence[float]) -> Mean | None:
    """Returns the mean of finite values; None if there are none."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Mean(1, mean, None, 0.0)
    squared_error = statistics.variance(values) / count
    half = student(count - 1) * math.sqrt(squared_error)
    low = mean - half if min(values) < 0 else max(0.0, mean - half)
    return Mean(count, mean, (low, mean + half), squared_error)


def ratio_interval(above: Mean, below: Mean) -> Interval | None:
    """Returns Fieller's interval for the ratio of two means; None if either is of a single value.

    If the lower mean may be 0, every ratio is possible: the interval is from 0 to infinity.
    """
    if above.count < 2 or below.count < 2 or below.mean == 0:
        return None
    ratio = above.mean / below.mean
    v1, v2 = above.squared_error, below.squared_error
    spread = v1 + ratio**2 * v2
    if spread == 0:
        return ratio, ratio
    freedom = spread**2 / (v1**2 / (above.count - 1) + ratio**4 * v2**2 / (below.count - 1))
    t2 = student(freedom) ** 2
    # a·r² - 2·b·r + c ≤ 0
    a, b, c = below.mean**2 - t2 * v2, above.mean * below.mean, above.mean**2 - t2 * v1
    if a <= 0:
        return 0.0, math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    return max(0.0, (b - root) / a), (b + root) / a


def difference_interval(one: Mean, other: Mean) -> Interval | None:
    """Returns Welch's interval for the first mean minus the second; None if either is of a single value."""
    if one.count < 2 or other.count < 2:
        return None
    difference, v1, v2 = one.mean - other.mean, one.squared_error, other.squared_error
    if v1 + v2 == 0:
        return difference, difference
    freedom = (v1 + v2) ** 2 / (v1**2 / (one.count - 1) + v2**2 / (other.count - 1))
    half = student(freedom) * math.sqrt(v1 + v2)
    return difference - half, difference + half


def student(freedom: float) -> float:
    """Returns the 97.5 % point of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, _UPPER))
