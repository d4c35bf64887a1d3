"""Which weights a backward reaches.

Trainers that exchange gradients in the order in which they come take for granted that all workers use the same weights:
with other ones they wait for each other, or add gradients of one weight to another.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

_SHOWN = 3


class UsedWeights:
    """Notes the trainable weights that backwards reach."""

    def __init__(self, model: torch.nn.Module, *, with_gradient: bool) -> None:
        """
        Args:
            model: the plain model, before a trainer registers hooks of its own.
            with_gradient: a weight that a backward reaches without a gradient, as under ONNX Runtime, is not used.
        """
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._with_gradient = with_gradient
        self._reached: set[int] = set()
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for number, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(partial(self._note, number))

    def take_unused(self) -> frozenset[str]:
        """The weights that no backward has reached since the last call."""
        if len(self._reached) == len(self._names):
            self._reached.clear()
            return frozenset()
        unused = frozenset(name for number, name in enumerate(self._names) if number not in self._reached)
        self._reached.clear()
        return unused

    def _note(self, number: int, weight: torch.Tensor) -> None:
        if weight.grad is not None or not self._with_gradient:
            self._reached.add(number)


def in_words(names: Collection[str]) -> str:
    """The first names of weights, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(sorted(names)[:_SHOWN]) or "some parameters") + more
