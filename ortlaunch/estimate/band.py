"""From the traced tensors of a worker to the memory of its process: a low, a middle and a high figure for each phase.

The constants were fitted to measured runs; docs/estimate.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortlaunch.launch.memory.band import MIB, Band


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


def bands_of(backend: str, base: int, phases: Mapping[str, Any]) -> dict[str, Band]:
    """The band of each phase of a trace, as `Trace.to_json` wrote it."""
    return {name: phase_band(backend, base, use) for name, use in phases.items()}
