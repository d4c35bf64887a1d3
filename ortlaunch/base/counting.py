"""Which of many times something is done."""

from __future__ import annotations


def is_power_of_two(count: int) -> bool:
    """Whether a count is 1, 2, 4, 8 and so on: what is done then costs little, however often it comes up."""
    return count > 0 and count & (count - 1) == 0
