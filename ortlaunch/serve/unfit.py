"""Why a submission is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Why a request is refused."""

    key: str | None
    message: str


class Unfit(Exception):
    """A request that is refused."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(one.message for one in problems))
        self.problems = problems
