"""The position of training in the data, from which a resumed run continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """The position in the data after the last batch that was taken.

    In a data set with numbered samples, and in a stream that is shared out, the position is valid for any number of
    workers, because they share one order. In other streams, each worker reads its own part. The position is then valid
    only for this worker and the same number of workers.
    """

    epoch: int = 0
    samples: int = 0
    """The samples of this epoch that all workers together have taken or dropped; 0 where each has its own part."""
    batches: int = 0
    """The batches of this epoch that this worker has taken from its stream; 0 for a data set."""
    process: int = 0
    """The loader process that gives the next batch, where there are `states`."""
    states: tuple[Any, ...] = ()
    """Of a stream with a ``state_dict``: that of each loader process, None for one that has given nothing yet."""

    def as_dict(self) -> dict[str, int]:
        """The position without `states`, as plain numbers."""
        return {name: getattr(self, name) for name in ("epoch", "samples", "batches", "process")}
