"""From the traced tensors of a worker to the memory of its process: a low, a middle and a high figure for each phase.

The constants were fitted to measured runs; docs/estimate.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Band:
    """Bytes of one process."""

    low: int
    middle: int
    high: int

    def to_json(self) -> dict[str, int]:
        """The figures under the names of the report."""
        return {"low_bytes": self.low, "peak_bytes": self.middle, "high_bytes": self.high}


def phase_band(backend: str, base: int, use: Mapping[str, int]) -> Band:
    """The memory of a process in one phase.

    Args:
        backend: the backend's name.
        base: bytes of the process without tensors.
        use: the phase's ``tensors`` and ``process`` in bytes, as eager PyTorch has them.
    """
    tensors, process = use["tensors"], use["process"]
    holes = process - tensors
    if backend == "ort":
        return _ort(base, tensors)
    return Band(
        low=int(0.95 * base) + tensors,
        middle=base + process,
        high=int(1.05 * (base + process)) + holes // 2,
    )


def _ort(base: int, tensors: int) -> Band:
    # The export and the check at the start need a part that does not grow with the batch.
    return Band(base + tensors // 2, base + 140 * MIB + int(0.7 * tensors), base + 400 * MIB + 2 * tensors)


def worst(bands: Mapping[str, Band]) -> tuple[str, Band]:
    """The phase with the highest middle figure, and a band that covers all phases."""
    name = max(bands, key=lambda one: bands[one].middle)
    everything = bands.values()
    return name, Band(
        max(one.low for one in everything), max(one.middle for one in everything), max(one.high for one in everything)
    )


def verdict(total: Band, limit: int | None) -> str:
    """``fits``, ``tight`` or ``does not fit``; ``unknown`` without a limit.

    A run fits if even its high figure is below the limit, and does not fit if even its low one is above.
    """
    if limit is None:
        return "unknown"
    if total.high <= limit:
        return "fits"
    return "does not fit" if total.low > limit else "tight"


def times(band: Band, count: int) -> Band:
    """The memory of several equal processes."""
    return Band(band.low * count, band.middle * count, band.high * count)


def bands_of(backend: str, base: int, phases: Mapping[str, Any]) -> dict[str, Band]:
    """The band of each phase of a trace, as `Trace.to_json` wrote it."""
    return {name: phase_band(backend, base, use) for name, use in phases.items()}
