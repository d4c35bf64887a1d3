"""Limits of numbers that a user gives."""

from __future__ import annotations

MOST_SECONDS = 100_000_000
"""The longest waiting time, about three years. Clocks of libraries overflow at longer ones."""
