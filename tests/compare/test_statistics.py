"""Intervals, against numbers counted by hand, tables, and another way to the same figures."""

from __future__ import annotations

import math
import random

import pytest
import scipy.stats

from ortlaunch.compare.statistics import difference_interval, mean_of, ratio_interval, student

T = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262}
"""The 97.5 % points that every table of Student's t has."""


@pytest.mark.parametrize("freedom", list(T))
def test_student_is_that_of_the_tables(freedom: int) -> None:
    assert student(freedom) == pytest.approx(T[freedom], abs=5e-4)


def test_mean_of_three_runs_by_hand() -> None:
    # Mean 1200; deviations -20, 5, 15: s² = (400 + 25 + 225) / 2 = 325; s/√3 = 10.4083; t(2) = 4.30265.
    mean = mean_of([1180.0, 1205.0, 1215.0])
    assert mean is not None and mean.interval is not None
    assert (mean.count, mean.mean) == (3, 1200.0)
    assert mean.interval == pytest.approx((1200 - 44.7834, 1200 + 44.7834), abs=1e-3)


def test_one_run_has_no_interval_and_none_no_mean() -> None:
    single, several = mean_of([7.0]), mean_of([1.0, 2.0])
    assert single is not None and several is not None
    assert single.interval is None
    assert mean_of([]) is None
    assert ratio_interval(single, several) is None and ratio_interval(several, single) is None


def test_no_rate_is_below_nothing() -> None:
    wide, signed = mean_of([10.0, 100.0]), mean_of([-1.0, 1.0])
    assert wide is not None and wide.interval is not None and signed is not None and signed.interval is not None
    assert wide.interval[0] == 0.0 and wide.interval[1] > 600 and signed.interval[0] < -10


def test_fieller_by_hand() -> None:
    # Above: 2, 2, 2.3, 2.5 has m 2.2, v 0.06/4 = 0.015. Below: 0.9, 1.1, 1.0 has m 1, v 0.01/3. Ratio 2.2:
    # spread = 0.015 + 4.84/300 = 0.0311333; freedom = 0.0311333² / (0.015²/3 + (4.84/300)²/2) = 4.72494.
    above, below = mean_of([2.0, 2.0, 2.3, 2.5]), mean_of([0.9, 1.1, 1.0])
    assert above is not None and below is not None
    t2 = student(4.72494) ** 2
    a, b, c = 1 - t2 / 300, 2.2, 4.84 - t2 * 0.015
    expected = ((b - math.sqrt(b * b - a * c)) / a, (b + math.sqrt(b * b - a * c)) / a)
    assert ratio_interval(above, below) == pytest.approx(expected, rel=1e-5)


def test_the_ends_are_where_the_t_test_just_rejects() -> None:
    """Another way to the same figure: at each end, the t statistic of m1 - r·m2 is the critical one."""
    first, second = [1530.0, 1495.0, 1510.0, 1522.0], [1210.0, 1180.0, 1204.0]
    above, below = mean_of(first), mean_of(second)
    assert above is not None and below is not None
    ends = ratio_interval(above, below)
    assert ends is not None and ends[0] < above.mean / below.mean < ends[1]
    ratio = above.mean / below.mean
    v1, v2 = above.squared_error, below.squared_error * ratio**2
    critical = student((v1 + v2) ** 2 / (v1**2 / 3 + v2**2 / 2))
    for end in ends:
        statistic = abs(above.mean - end * below.mean) / math.sqrt(above.squared_error + end**2 * below.squared_error)
        assert statistic == pytest.approx(critical, rel=1e-9)


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    draw = random.Random(5)
    held = 0
    for _ in range(2000):
        above = mean_of([draw.gauss(150, 5) for _ in range(3)])
        below = mean_of([draw.gauss(100, 2) for _ in range(3)])
        assert above is not None and below is not None
        ends = ratio_interval(above, below)
        assert ends is not None
        held += ends[0] <= 1.5 <= ends[1]
    assert 0.935 <= held / 2000 <= 0.975


def test_a_baseline_that_may_be_nothing_leaves_every_ratio_possible() -> None:
    above, below = mean_of([10.0, 11.0]), mean_of([1.0, 100.0])
    assert above is not None and below is not None
    assert ratio_interval(above, below) == (0.0, math.inf)


def test_repeats_without_any_spread_are_sure_of_their_ratio() -> None:
    above, below = mean_of([3.0, 3.0]), mean_of([2.0, 2.0])
    assert above is not None and below is not None
    assert ratio_interval(above, below) == (1.5, 1.5)


def test_the_interval_of_a_difference_is_welchs() -> None:
    """As scipy's own t-test has it, for values of both signs."""
    first, second = [-0.3, 0.5, 0.1, 0.4], [-1.2, -0.8, -1.9]
    one, other = mean_of(first), mean_of(second)
    assert one is not None and other is not None
    wanted = scipy.stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    assert difference_interval(one, other) == pytest.approx((wanted.low, wanted.high), rel=1e-9)
    alike, single = mean_of([3.0, 3.0]), mean_of([2.0])
    assert alike is not None and single is not None
    assert difference_interval(alike, alike) == (0.0, 0.0) and difference_interval(alike, single) is None
