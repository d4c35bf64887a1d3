"""Which batches are compared with PyTorch while a run trains: those of new sizes, and some evaluated ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ortlaunch.base.counting import is_power_of_two
from ortlaunch.data.batch import Batch, is_flat, named
from ortlaunch.ort.module.by_size import Sizes

_MOST = 32
"""Sizes that are compared; data may have other ones in every step."""


def sizes_of(batch: Batch) -> Sizes:
    """Returns the shapes of a batch's tensors in order."""
    return tuple(tuple(tensor.shape) for tensor in named(batch).values())


def is_new(sizes: Sizes, known: set[Sizes]) -> bool:
    """Whether sizes are not among few known ones, to which they are added."""
    if sizes in known or len(known) >= _MOST:
        return False
    known.add(sizes)
    return True


def resized(batch: Batch, like: Batch) -> Batch | None:
    """Returns a batch of another one's sizes and of other values: each dimension is cut off, or begins again.

    A graph that is traced with it, and right for the other one, has not taken values of the trace for constants. It is
    None where there is no such batch.
    """
    if not is_flat(batch) or not is_flat(like):
        return None
    made = {}
    for name, tensor in batch.items():
        sizes = like[name].shape if name in like else ()
        if len(sizes) != tensor.dim() or not tensor.numel():
            return None
        for dim, size in enumerate(sizes):
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
        made[name] = tensor
    return None if all(torch.equal(tensor, like[name]) for name, tensor in made.items()) else made


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
