"""What the loop drives: a wrapped model with its optimizer, one class per way of sharing the training."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ortlaunch.trainer.task import Batch


class Engine(ABC):
    """Forward, backward and optimizer step of one worker."""

    inner: torch.nn.Module
    """What the backend returned: the plain model, or an ORTModule."""

    @abstractmethod
    def micro_step(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch.

        Args:
            batch: tensors on this worker's device.
            last: whether the optimizer step follows; workers exchange gradients only then.

        Returns:
            The micro-batch's loss, a detached scalar on the device.
        """

    @abstractmethod
    def step(self) -> torch.Tensor | float | None:
        """Clips, updates the weights, moves the schedule and clears the gradients.

        Returns:
            The gradient norm over all workers before clipping; None where clipping is off. Not yet read from the
            device where it lies on one.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate that the next step will use."""
