"""The errors of requests that cannot be done as they are, or not now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request."""

    key: str | None
    """The key that it is about; None if it is about none."""
    message: str


class Unfit(Exception):
    """The answer is 422, with each message beside its key."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(one.message for one in problems))
        self.problems = problems


class Unavailable(Exception):
    """There is no answer now: a child took too long, was killed or could not be started, or a file server hangs."""


def unfit(message: str, key: str | None = None) -> Unfit:
    """Returns the error of a request with one problem."""
    return Unfit(Problem(key, message))
