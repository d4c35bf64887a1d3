"""A clock for what is measured, to be moved by hand."""

from __future__ import annotations


class FakeTime:
    """Gives its seconds when it is called."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds
