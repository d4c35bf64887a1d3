"""The loss and the named values of a step: the means over its micro-batches, on the device."""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.models.task import Result


class Mean:
    """Adds up the weighed losses and values of micro-batches; the host waits for nothing."""

    def __init__(self, count: int, device: torch.device) -> None:
        """
        Args:
            count: micro-batches of the step.
            device: where losses are.
        """
        self._count = count
        self._loss = torch.zeros((), device=device)
        self._values: dict[str, Any] = {}

    def add(self, result: Result) -> None:
        """Takes a micro-batch."""
        # Not in place: a script may train in fp64.
        self._loss = self._loss + result.loss
        for name, value in result.values.items():
            self._values[name] = self._values.get(name, 0.0) + value

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss, a scalar on the device."""
        return self._loss / self._count

    def values(self) -> dict[str, float]:
        """The mean of each value by name, on the host."""
        return {name: float(total) / self._count for name, total in self._values.items()}
