"""The error of a request that cannot be done as it is."""

from __future__ import annotations


class Problem(Exception):
    """The answer is 422 with this message beside the key."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key
