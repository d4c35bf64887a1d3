"""An exponential moving average of the weights, as `torch.optim.swa_utils` computes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """The average of a model's trained weights; of sharded ones each worker holds that of its shards."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """
        Args:
            model: the model as its optimizer knows it.
            decay: the share that the average keeps of itself in each step.
        """
        self._mean = get_ema_multi_avg_fn(decay)
        self._weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.tensors = {name: one.detach().clone() for name, one in self._weights.items()}
        """The average of each weight by name."""
        self.steps = 0
        """Steps that are in the average."""
        self._of = {id(one): self.tensors[name] for name, one in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights of a step that has ended into the average; those of the first one are the average."""
        averages, weights = [list(map(_local, one.values())) for one in (self.tensors, self._weights)]
        if self.steps:
            self._mean(averages, weights, self.steps)  # type: ignore[arg-type]
        else:
            torch._foreach_copy_(averages, weights)
        self.steps += 1

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The average of a weight, or what is not trained itself."""
        return self._of.get(id(weight), weight)

    def load(self, stored: Mapping[str, torch.Tensor], steps: int) -> None:
        """Takes what a checkpoint has; an average that it has not begins with the weights of the next step."""
        for name, average in self.tensors.items():
            average.copy_(stored.get(name, self._weights[name].detach()))
        self.steps = steps

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the model's weights are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            own, average = _local(weight), _local(self.tensors[name])
            before = own.clone()
            own.copy_(average)
            average.copy_(before)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's part in the memory of this worker."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
