"""Counts at which something is done."""

from __future__ import annotations

from ortlaunch.base.counting import is_power_of_two


def test_the_powers_of_two_among_counts() -> None:
    assert [one for one in range(-4, 40) if is_power_of_two(one)] == [1, 2, 4, 8, 16, 32]
