"""The position of training in the data, from which a resumed run continues."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Position:
    """The position in the data after the last batch that was taken.

    In a data set with numbered samples, the position is valid for any number of workers, because they share one order.
    In a stream, each worker reads its own part. The position is then valid only for this worker and the same number of
    workers.
    """

    epoch: int = 0
    samples: int = 0
    """The samples of this epoch that all workers together have taken or dropped; 0 for a stream."""
    batches: int = 0
    """The batches of this epoch that this worker has taken from its stream; 0 for a data set."""

    def as_dict(self) -> dict[str, int]:
        """The position as plain numbers, for a file."""
        return asdict(self)
