"""Keeps a loss that is not finite out of the weights, without making the host wait for a GPU."""

from __future__ import annotations

import torch


class Guard:
    """Remembers, on the device, the first step whose numbers were not finite, and discards every step from it on.

    A loss that is not finite is passed to the backward with a gradient of NaN. The exchange of gradients carries it to
    all workers, whose gradient norm, one and the same number everywhere, then says: no step. So workers agree without
    a collective of their own. Once a worker has seen such a step it goes on like that, and the weights stay those
    before the step, until the host reads the memory where it waits for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 1
        """Number of the step that is being computed; set by the loop."""
        # First steps with a loss of this worker, and with gradients of all of them, that were not finite; 0 for none.
        self._first = torch.zeros(2, dtype=torch.int64, device=device)
        self._nan = torch.tensor(float("nan"), device=device)
        self._one = torch.ones((), device=device)

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to take the backward of: the same, or one whose gradients are all NaN.

        Args:
            loss: a micro-batch's loss, a scalar tensor with its graph.
        """
        self._note(0, torch.isfinite(loss.detach()).all())
        return loss * torch.where(self._first.any(), self._nan, self._one)

    def check_gradients(self, finite: torch.Tensor | bool) -> None:
        """Notes whether the gradient norm was finite; not for fp16, where a norm that is not only lowers the scale."""
        self._note(1, finite)

    def read(self) -> tuple[int, int]:
        """The first steps with a loss of this worker, and with gradients, that were not finite; 0 for none.

        Waits for the device.
        """
        loss, gradients = self._first.tolist()
        return loss, gradients

    def _note(self, kind: int, finite: torch.Tensor | bool) -> None:
        first = self._first[kind]
        first.copy_(torch.where((first > 0) | finite, first, self.step))
