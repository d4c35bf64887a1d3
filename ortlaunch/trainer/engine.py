"""What the loop drives: a wrapped model with its optimizer, one class per way of sharing the training."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.models.task import Batch
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.guard import Guard


class Engine(ABC):
    """Forward, backward and optimizer step of one worker."""

    inner: torch.nn.Module
    """What the backend returned: the plain model, or an ORTModule."""
    guard: Guard
    """What keeps losses and gradients that are not finite out of the weights."""
    forward_done: Callable[[], None] = staticmethod(lambda: None)
    """Called in `micro_step` between forward and backward; set by the loop."""
    tripped: bool = False
    """Whether the host knows that the last step was discarded because its numbers were not finite. The same on all
    workers; always False where knowing it would mean to wait for the device, and in fp16, where it is no failure."""

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

        With gradients that are not finite, weights and optimizer state stay as they were.

        Returns:
            The gradient norm over all workers before clipping; None where it is not known. Not yet read from the
            device where it lies on one.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch, a scalar on the device; to be called within `evaluating`."""

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode and without gradients; in training mode again afterwards."""
        self.inner.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.inner.train()

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate that the next step will use."""

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        """What the model is called in: autocast, where the engine does it that way."""
        return contextlib.nullcontext()

    @property
    def loss_scale(self) -> float | None:
        """Factor on the loss in fp16; None in other precisions. Waits for the device."""
        return None

    @abstractmethod
    def snapshot(self, folder: Path) -> Write:
        """Copies all state that the next step depends on to host memory; all workers call it.

        Args:
            folder: where it will be written.

        Returns:
            What writes this worker's part into `folder`, from any thread.
        """

    def warm_up(self, batch: Batch) -> None:
        """Before `restore`: does what an engine does differently in its first step, and leaves no gradients.

        Args:
            batch: any micro-batch on this worker's device.
        """
        return

    @abstractmethod
    def restore(self, folder: Path, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
        """Loads what `snapshot` wrote, before the first step; all workers call it.

        Args:
            folder: where it lies.
            saved_workers: how many workers wrote it.
            scratch: a folder that may be filled meanwhile.
            group: all workers, on the CPU.
        """

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's weights and buffers by their plain names, whole and in host memory; all workers call it.

        Returns:
            Floating-point weights as the optimizer keeps them (fp32); empty on all workers but the first.
        """
