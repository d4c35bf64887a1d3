"""Argument types for argparse. A type that refuses a value says which values it accepts."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parses a whole number that is 1 or more."""
    return _at_least(1, text)


def count(text: str) -> int:
    """Parses a whole number that is 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, {least} or more")
    return value
