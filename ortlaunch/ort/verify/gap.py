"""The output that differs most from PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.ort.verify.compare import relative_error, tolerance_of
from ortlaunch.ort.verify.nested import NamedTensors


@dataclass(frozen=True)
class Gap:
    """The output that differs most from PyTorch's."""

    name: str
    error: float | None
    """Relative error; None if it is not defined, for example for another shape."""
    tolerance: float

    def exceeds(self, least: float) -> bool:
        """Whether the error is larger than `least`, or not defined."""
        return self.error is None or self.error > least

    @property
    def differs(self) -> bool:
        """Whether the error is larger than rounding explains."""
        return self.exceeds(self.tolerance)

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.name} cannot even be compared"
        return f"{self.name} by {self.error:.2g} of its largest value"


def widest(actual: NamedTensors, expected: NamedTensors) -> Gap:
    """Returns the output with the largest error relative to its tolerance."""
    gaps = [
        Gap(name, relative_error(actual[name], tensor) if name in actual else None, tolerance_of(tensor))
        for name, tensor in expected.items()
    ]
    if not gaps:
        return Gap("output", 0.0, 0.0)
    return max(gaps, key=lambda gap: float("inf") if gap.error is None else gap.error / max(gap.tolerance, 1e-12))
