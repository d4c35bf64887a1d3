"""What is tried, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = str | int
Stage = Literal["probe", "short", "long", "round", "again"]


@dataclass(frozen=True)
class Cell:
    """One combination of the space: a value on each axis."""

    values: tuple[tuple[str, Value], ...]
    """The axes and the values, in the order of the axes."""

    @classmethod
    def of(cls, **values: Value) -> Cell:
        """A cell with these values, axis by axis."""
        return cls(tuple(values.items()))

    def __getitem__(self, axis: str) -> Value:
        return dict(self.values)[axis]

    def having(self, **changes: Value) -> Cell:
        """The cell with other values on some axes."""
        return Cell(tuple((axis, changes.get(axis, value)) for axis, value in self.values))

    def __str__(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in self.values)


@dataclass(frozen=True)
class Effort:
    """How long a trial measures, and why."""

    stage: Stage
    number: int
    """The round, from 0; of the last trials, how many there were before. The same trial of a stage is never repeated
    under one number."""
    seconds: float
    """Seconds of training that are wanted, without the start. 0 takes the fewest steps."""
    rate: float | None
    """Samples per second that are expected, from which the number of steps follows; None if nothing is known."""
    timeout: float
    """Seconds after which the trial is ended."""
