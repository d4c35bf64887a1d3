"""From the traced tensors of a worker to the memory of its process: a low, a middle and a high figure for each phase.

The constants were fitted to measured runs; docs/estimate.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortlaunch.launch.memory.band import MIB, Band

_BESIDE = 16 * MIB
"""How much more or less than supposed a worker may hold beside its tensors, at most. Two workers of gpt2_nano without
holes in the heap held 6 MiB more than the tracing process, where 27 are supposed."""
OPENING = "data"
"""The phase in which a worker opens the data and reads its first batch."""


def phase_band(backend: str, base: int, use: Mapping[str, int]) -> Band:
    """The memory of a process in one phase.

    Args:
        backend: the backend's name.
        base: bytes of the process without tensors.
        use: the phase's ``least``, ``tensors``, ``process`` and ``most`` in bytes, as eager PyTorch has them.
    """
    tensors, process = use["tensors"], use["process"]
    holes = process - tensors
    if backend == "ort":
        return _ort(base, tensors)
    eager = Band(
        low=max(0, int(0.95 * base) - _BESIDE) + use["least"],
        middle=base + process,
        # Holes of up to 1.75 times the middle model's were measured in a few dozens of runs; others may have more.
        high=int(1.05 * (base + process)) + _BESIDE + max(holes, use["most"] - process),
    )
    return _compile(eager, base, use["least"]) if backend == "compile" else eager


def _ort(base: int, tensors: int) -> Band:
    # The export and the check at the start need a part that does not grow with the batch.
    return Band(base + tensors // 2, base + 140 * MIB + int(0.7 * tensors), base + 400 * MIB + 2 * tensors)


def _compile(eager: Band, base: int, least: int) -> Band:
    # Fused operations keep less than eager ones do. The compiler's modules and graphs took 75 to 100 MiB for an mlp.
    low = int(0.95 * base) + 40 * MIB + least // 2
    return Band(low, max(low, eager.middle + 90 * MIB), max(low, eager.high + 200 * MIB))


def worst(bands: Mapping[str, Band]) -> tuple[str, Band]:
    """The phase with the highest middle figure, and a band that covers all phases."""
    name = max(bands, key=lambda one: bands[one].middle)
    everything = bands.values()
    return name, Band(
        max(one.low for one in everything), max(one.middle for one in everything), max(one.high for one in everything)
    )


def bands_of(
    backends: Sequence[str], base: int, phases: Mapping[str, Any], probed: Mapping[str, Mapping[str, Band]]
) -> dict[str, Band]:
    """The band of each phase of a trace, as `Trace.to_json` wrote it.

    Args:
        backends: the backend, or all that the run may take. Then the likely and the high figure are those of the one
            that needs the most, and the low figure is of the one that needs the least.
        base: bytes of the process without tensors.
        phases: what the phases use, by name.
        probed: the memory of the phases under the backends that were probed.
    """
    return {
        name: any_of(
            [
                # No backend runs yet where data is opened.
                probed[one][name] if one in probed else phase_band("eager" if name == OPENING else one, base, use)
                for one in backends
            ]
        )
        for name, use in phases.items()
    }


def any_of(bands: Sequence[Band]) -> Band:
    """The memory of one of several backends: from the least that one needs to the most that one needs."""
    return Band(min(one.low for one in bands), max(one.middle for one in bands), max(one.high for one in bands))
