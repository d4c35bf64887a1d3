"""Named figures that all workers share in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from ortlaunch.trainer.workers import Workers


@dataclass(frozen=True)
class Figures:
    """Base of a group of figures; a subclass declares each of them as a field of the type `torch.Tensor`.

    The fields have one dimension, whose index is the rank, and one more for figures of several numbers. This class
    alone knows which column of the collective holds which figure.
    """

    @classmethod
    def gathered(cls, workers: Workers, **values: float | Sequence[float]) -> Self:
        """The figures of all workers, as float64 tensors on the CPU, in one collective that all workers call.

        Args:
            workers: the workers.
            values: this worker's, one number or several for each field; the same number of them on every worker.
        """
        packed: list[float] = []
        places: list[int | slice] = []
        for field in fields(cls):
            value = values.pop(field.name)
            first = len(packed)
            if isinstance(value, Sequence):
                packed += value
                places.append(slice(first, len(packed)))
            else:
                packed.append(value)
                places.append(first)
        if values:
            raise TypeError(f"{cls.__name__} has no {', '.join(values)}")
        everyone = workers.gather(packed)
        return cls(*(everyone[:, place] for place in places))
