"""Keeps a loss that is not finite out of the weights, without making the host wait for a GPU."""

from __future__ import annotations

import math

import torch


class Guard:
    """Remembers, on the device, the first step whose numbers were not finite, and discards it and all later steps.

    A loss that is not finite makes all gradients of its worker NaN. The exchange of gradients carries them to all
    workers, whose gradient norm is then NaN as well, and a step with such a norm is discarded. So the workers agree
    without a further collective. From then on the worker makes the gradients of every step NaN: the weights stay those
    before the first bad step until the host reads this memory at a log step, where it waits for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 1
        """Number of the step that is being computed; set by the loop."""
        # The first steps with a bad loss of this worker, and with bad gradients of all workers; 0 for none.
        self._first = torch.zeros(2, dtype=torch.int64, device=device)
        self._nan = torch.tensor(float("nan"), device=device)
        self._one = torch.ones((), device=device)
        self.reads_values = device.type == "cpu"
        """Whether the host looks at the numbers of each step. On the CPU it waits for nothing then."""
        self._was_bad = False

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss for the backward: the same, or one whose gradients are all NaN.

        Args:
            loss: a micro-batch's loss, a scalar tensor with its graph.
        """
        if self.reads_values and self._is_fine(math.isfinite(loss.item())):
            return loss
        self._note(0, torch.isfinite(loss.detach()).all())
        return loss * torch.where(self._first.any(), self._nan, self._one)

    def check_gradients(self, finite: torch.Tensor | bool) -> None:
        """Notes whether the gradient norm was finite; not for fp16, which only lowers its loss scale then."""
        if not (self.reads_values and self._is_fine(bool(finite))):
            self._note(1, finite)

    def read(self) -> tuple[int, int]:
        """The first steps with a bad loss of this worker, and with bad gradients of all workers; 0 for none.

        Waits for the device.
        """
        loss, gradients = self._first.tolist()
        return loss, gradients

    def _is_fine(self, finite: bool) -> bool:
        """Whether there is nothing to note and nothing to discard: all numbers were finite, and these are."""
        self._was_bad |= not finite
        return not self._was_bad

    def _note(self, kind: int, finite: torch.Tensor | bool) -> None:
        first = self._first[kind]
        first.copy_(torch.where((first > 0) | finite, first, self.step))
