"""What the verbs' own options are read with: a parser, and types that say which values they accept."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ortlaunch.base.errors import RequestError
from ortlaunch.base.limits import MOST_SECONDS

_MOST_DIGITS = 18
"""No number that a user means is longer."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, with one line for an error, like that of every wrong request."""

    def error(self, message: str) -> NoReturn:
        """Refuses the command line.

        Raises:
            RequestError: always.
        """
        words = message.removeprefix("argument ")
        raise RequestError(f"{self.prog.removeprefix('ortlaunch ')}: {words} ({self.prog} --help)")


def positive(text: str) -> int:
    """Parses a whole number that is 1 or more."""
    return _at_least(1, text)


def count(text: str) -> int:
    """Parses a whole number that is 0 or more."""
    return _at_least(0, text)


def seconds(text: str) -> float:
    """Parses a waiting time: a number of seconds that is 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds, 0 or more")
    return value


def _at_least(least: int, text: str) -> int:
    value = whole(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, {least} or more")
    return value


def whole(text: str) -> int | None:
    """Parses a whole number without a sign; None if the text is none, or no number that anyone could mean."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
