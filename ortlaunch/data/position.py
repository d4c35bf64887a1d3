"""How far training has come in the data, so that it can go on from there."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Position:
    """A place in the data, after the last batch that was taken.

    For a data set with numbered samples it holds for any number of workers, since they share one order; for a stream,
    where each worker reads a part of its own, for this worker among as many.
    """

    epoch: int = 0
    samples: int = 0
    """Samples of this epoch that all workers together have taken, or that were left over from it; 0 for a stream."""
    batches: int = 0
    """Batches of this epoch that this worker has taken from its stream; 0 for a data set."""

    def as_dict(self) -> dict[str, int]:
        """As plain numbers, for a file."""
        return asdict(self)
