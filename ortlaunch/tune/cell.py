"""What is tried, how long, and what came of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Value = str | int
Stage = Literal["probe", "short", "long", "round", "again"]
Status = Literal["ok", "out of memory", "time-out", "failed"]

MOST_OF_CORES = 0.5
"""With this share of the cores in other hands, a time-out says little about what was tried."""


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


@dataclass(frozen=True)
class Outcome:
    """What a trial found. Running out of memory and not ending in time are results as good as a speed."""

    status: Status
    seconds: float
    """Seconds that the trial took, with its start."""
    rate: float = 0.0
    """Samples of all workers in a second, once the speed is steady."""
    start: float = 0.0
    """Seconds that export, compilation and slow first steps take beyond those of steady steps."""
    peak_bytes: int = 0
    """The largest memory that the trial's processes had together."""
    others: float = 0.0
    """Share of the cores that a run may use which other processes had meanwhile, from 0 to 1."""
    reason: str = ""
    """Why there is no speed."""
    run: str = ""
    """The run folder."""
    is_of_machine: bool = False
    """Whether the machine failed and not the configuration, which may train in another trial."""
    is_noted: bool = field(default=False, compare=False)
    """Whether it was measured before the search was interrupted, and is not measured again."""

    @property
    def ok(self) -> bool:
        """Whether there is a speed."""
        return self.status == "ok"

    @property
    def is_late_by_others(self) -> bool:
        """Whether it did not end in time while other processes had most of the cores."""
        return self.status == "time-out" and self.others >= MOST_OF_CORES

    def score(self, work: float) -> float:
        """Samples per second over a whole run, with the start that its backend costs.

        Args:
            work: samples of the whole run; infinite for the steady speed alone.
        """
        if not self.ok or self.rate <= 0:
            return 0.0
        return self.rate if math.isinf(work) else work / (self.start + work / self.rate)

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain values, without where this object is from."""
        return {name: value for name, value in asdict(self).items() if name != "is_noted"}
