"""The error of a request that cannot be done as it is."""

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


def unfit(message: str, key: str | None = None) -> Unfit:
    """Returns the error of a request with one problem."""
    return Unfit(Problem(key, message))
