"""A low, a middle and a high figure for the same memory, and what they say beside a limit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ortlaunch.config.devices import usable_cores

MIB = 2**20
COMPILER = 250 * MIB
"""A process of the C++ compiler on a kernel of torch.compile (223 MiB were measured for gpt2_nano)."""
LOADER = 50 * MIB
"""What a loader process comes to have for itself later than after its first batches, at most."""
_MOST_COMPILERS = 32


@dataclass(frozen=True)
class Band:
    """Bytes of one process or one machine."""

    low: int
    middle: int
    high: int

    def to_json(self) -> dict[str, int]:
        """The figures under the names of the report."""
        return {"low_bytes": self.low, "peak_bytes": self.middle, "high_bytes": self.high}


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


def total(bands: Iterable[Band]) -> Band:
    """The memory of processes beside each other."""
    listed = list(bands)
    return Band(sum(one.low for one in listed), sum(one.middle for one in listed), sum(one.high for one in listed))


def compilers_of(backends: Collection[str], workers: int) -> Band:
    """The compilers that work beside the workers of a machine in a first step; none if all kernels are kept.

    Args:
        backends: the backends that the run may take.
        workers: workers on the machine.
    """
    if "compile" not in backends:
        return Band(0, 0, 0)
    return Band(0, workers * COMPILER, workers * compilers() * COMPILER)


def loaders_of(own: Sequence[int], common: int) -> Band:
    """The loader processes of a worker.

    Args:
        own: bytes that each of them has for itself when it has read its first batches.
        common: bytes that they have in common with their worker. The worker comes to change nearly all of them, by
            Python's counts of references and collections, and then has its own; its loader processes keep one copy.
    """
    least = sum(own)
    return Band(least, least + common, least + common + len(own) * LOADER)


def compilers() -> int:
    """How many compilers torch.compile starts at once beside a worker, at most."""
    return min(_MOST_COMPILERS, usable_cores())


def size(count: int) -> str:
    """Bytes as text in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.0f} MiB"
