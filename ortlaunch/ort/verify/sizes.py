"""Which batches are compared with PyTorch while a run trains: those of new sizes, and some evaluated ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortlaunch.base.counting import is_power_of_two
from ortlaunch.data.batch import Batch, named

_MOST = 32
"""Sizes that are compared; data may have other ones in every step."""

Sizes = tuple[tuple[int, ...], ...]


def sizes_of(batch: Batch) -> Sizes:
    """Returns the shapes of a batch's tensors in order."""
    return tuple(tuple(tensor.shape) for tensor in named(batch).values())


def is_new(sizes: Sizes, known: set[Sizes]) -> bool:
    """Whether sizes are not among few known ones, to which they are added."""
    if sizes in known or len(known) >= _MOST:
        return False
    known.add(sizes)
    return True


@dataclass
class Evaluated:
    """The batches that were evaluated."""

    count: int = 0
    _sizes: set[Sizes] = field(default_factory=set)

    def is_due(self, batch: Batch) -> bool:
        """Counts a batch. It is compared if it is the first, second, fourth and so on, or has new sizes."""
        self.count += 1
        has_new_sizes = is_new(sizes_of(batch), self._sizes)
        return has_new_sizes or is_power_of_two(self.count)
