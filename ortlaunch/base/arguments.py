"""Types of the options of a command line: each says what it takes to who gives it something else."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(1, text)


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, {least} or more")
    return value
