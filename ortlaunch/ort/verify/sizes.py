"""Sizes of batches that have been compared with PyTorch."""

from __future__ import annotations

from ortlaunch.models.task import Batch

_MOST = 32
"""Sizes that are compared; data may have other ones in every step."""

Sizes = tuple[tuple[int, ...], ...]


def sizes_of(batch: Batch) -> Sizes:
    """Returns the shapes of a batch's tensors in order."""
    return tuple(tuple(tensor.shape) for tensor in batch.values())


def is_new(sizes: Sizes, known: set[Sizes]) -> bool:
    """Whether sizes are not among few known ones, to which they are added."""
    if sizes in known or len(known) >= _MOST:
        return False
    known.add(sizes)
    return True
