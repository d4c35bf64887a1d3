"""Named figures that all workers share in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from ortlaunch.trainer.workers import Workers


@dataclass(frozen=True)
class Figures:
    """Base of a group of figures; a subclass declares each of them as a field of the type `torch.Tensor`.

    `of` makes the figures of one worker. `gather` returns those of all workers: every field then has one dimension
    more, whose index is the rank. This class alone knows which column of the collective holds which figure.
    """

    @classmethod
    def of(cls, **values: float | Sequence[float]) -> Self:
        """The figures of one worker.

        Args:
            values: one number or several for each field; the same number of them on every worker.
        """
        tensors: dict[str, Any] = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return cls(**tensors)

    def gather(self, workers: Workers) -> Self:
        """The figures of all workers, as float64 tensors on the CPU, in one collective that all workers call."""
        own: list[torch.Tensor] = [getattr(self, field.name) for field in fields(self)]
        packed = torch.cat([figure.reshape(-1) for figure in own])
        columns = workers.gather(packed.tolist()).split([figure.numel() for figure in own], dim=1)
        return type(self)(*(part.reshape(-1, *figure.shape) for part, figure in zip(columns, own, strict=True)))
