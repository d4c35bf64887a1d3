"""From the traced tensors of a worker to the memory of its process or of its GPU, and what that says beside a limit.

Each figure is low, likely and high. The constants were fitted to measured runs; docs/estimate.md has the tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ortlaunch.config.devices import usable_cores

MIB = 2**20
COMPILER = 250 * MIB
"""A process of the C++ compiler on a kernel of torch.compile (223 MiB were measured for gpt2_nano)."""
LOADER = 50 * MIB
"""What a loader process comes to have for itself later than after its first batches, at most."""
_MOST_COMPILERS = 32
_BELOW_BASE = 16 * MIB
"""How much less than supposed a worker may hold beside its tensors, at most."""
_LEAST_KEPT = 0.9
"""The least that a process keeps for its tensors, as a share of their bytes: it may miss a peak of the trace."""


class _Kept(NamedTuple):
    """What a process keeps for its tensors, with the allocator's holes: a share of their bytes, and bytes beside."""

    likely: float
    likely_beside: int
    most: float
    most_beside: int


_KEPT, _KEPT_GATHERING = _Kept(1.1, 0, 1.4, 96 * MIB), _Kept(1.35, 30 * MIB, 3.0, 128 * MIB)
"""Fitted to runs of 3 steps (docs/estimate.md); after 20 steps one had 1.54 of their bytes and 64 MiB."""
_SPREAD = 0.08
"""How far a run may be from a trial of it; docs/estimate.md has what was measured."""
_CHANCE = 64 * MIB
"""How much more or less beside that, whatever the size: twelve runs of one small configuration took 578 to 700 MiB."""
_SPREAD_OF_SLOPE = 0.3
"""How far a line may be off per byte beyond a trial: ONNX Runtime's arena grows in powers of two."""
OPENING = "data"
"""The phase in which a worker opens the data and reads its first batch."""
_BELOW, _ABOVE = 0.05, 0.09
"""What torch allocated was at most 3.7 % below the trace's figure. What it reserved was at most 5.6 % above that, or
8.8 % where the optimizer's state is in the host's memory."""
_LEAST = 0.5
"""The least that fused kernels may keep, as a share of what those of eager PyTorch do."""
_MOST = {"compile": 1.6, "ort": 2.0}
"""The most that these backends may reserve, beside what eager PyTorch is estimated to. Under torch.compile BERT in fp32
reserved 1.34 times that (8.7 GiB); of ONNX Runtime nothing was measured."""


@dataclass(frozen=True)
class Band:
    """Bytes of one process or one machine."""

    low: int
    middle: int
    high: int

    def to_json(self) -> dict[str, int]:
        """The figures under the names of the report."""
        return {"low_bytes": self.low, "peak_bytes": self.middle, "high_bytes": self.high}


NOTHING = Band(0, 0, 0)
CONTEXT = Band(350 * MIB, 1330 * MIB, 2048 * MIB)
"""What a process holds on its GPU beside its tensors. On an H200 (torch 2.11, CUDA 13, NCCL 2.28) CUDA's context took
619 MiB, kernels of cuBLAS and cuDNN 84, cuBLAS's workspaces 64, and NCCL 556 for one worker. Other GPUs need less for
their context, and NCCL takes more where it has others to talk to."""


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
        return NOTHING
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


def phase_band(backend: str, base: int, tensors: int, *, is_sure: bool = True, gathers: bool = False) -> Band:
    """The memory of a process in one phase.

    Args:
        backend: the backend's name.
        base: bytes of the process without tensors.
        tensors: bytes that eager PyTorch holds at the peak.
        is_sure: whether each run comes to this peak.
        gathers: whether gloo gathers weights in threads of its own, whose heaps keep what they held.
    """
    certain = tensors if is_sure else 0
    if backend == "ort":
        # The export and the check at the start need a part that does not grow with the batch.
        return Band(base + certain // 2, base + 140 * MIB + int(0.7 * tensors), base + 400 * MIB + 2 * tensors)
    kept = _KEPT_GATHERING if gathers else _KEPT
    eager = Band(
        low=max(0, int(0.95 * base) - _BELOW_BASE) + int(_LEAST_KEPT * certain),
        middle=base + kept.likely_beside + int(kept.likely * tensors),
        high=int(1.05 * base) + kept.most_beside + int(kept.most * tensors),
    )
    if backend == "eager":
        return eager
    # Fused operations keep less than eager ones do. The compiler's modules and graphs took 75 to 100 MiB for an mlp.
    low = int(0.95 * base) + 40 * MIB + certain // 2
    return Band(low, max(low, eager.middle + 90 * MIB), max(low, eager.high + 200 * MIB))


def worst(bands: Mapping[str, Band]) -> tuple[str, Band]:
    """The phase with the highest middle figure, and a band that covers all phases."""
    name = max(bands, key=lambda one: bands[one].middle)
    everything = bands.values()
    return name, Band(
        max(one.low for one in everything), max(one.middle for one in everything), max(one.high for one in everything)
    )


def any_of(bands: Sequence[Band]) -> Band:
    """The memory of one of several backends: from the least that one needs to the most that one needs."""
    return Band(min(one.low for one in bands), max(one.middle for one in bands), max(one.high for one in bands))


def gpu_band(backend: str, tensors: int, reserved: int) -> Band:
    """The memory of a GPU in one phase.

    Args:
        backend: the backend's name.
        tensors: bytes that eager PyTorch has allocated.
        reserved: bytes that its allocator has reserved for them.
    """
    # Before it fails, the allocator returns what it has reserved and not given out.
    eager = Band(
        CONTEXT.low + int((1 - _BELOW) * tensors),
        CONTEXT.middle + reserved,
        CONTEXT.high + int((1 + _ABOVE) * reserved),
    )
    if backend == "eager":
        return eager
    low = CONTEXT.low + int(_LEAST * tensors)
    return Band(low, eager.middle, CONTEXT.high + int(_MOST[backend] * reserved))


def by_trials(points: Iterable[Sequence[int]], size: int, *, chance: int = 0, on_gpu: bool = False) -> Band:
    """The memory of a worker by trials with two micro-batches.

    Args:
        points: the micro-batches, each with the bytes of the largest worker.
        size: the micro-batch that is asked for.
        chance: bytes that are there or not by chance, as the copy of a checkpoint beside a step.
        on_gpu: whether the bytes are those that torch's allocator has reserved.
    """
    (near, found), (far, other) = sorted(points, key=lambda one: (abs(one[0] - size), one[0]))[:2]
    # A larger micro-batch does not need less; what is measured so is noise.
    beyond = int(max(0.0, (other - found) / (far - near)) * (size - near))
    middle = max(0, found + beyond)
    off = int(_SPREAD * middle + _SPREAD_OF_SLOPE * abs(beyond)) + _CHANCE + chance
    band = Band(max(0, middle - off), middle, middle + off)
    return total([CONTEXT, band]) if on_gpu else band
