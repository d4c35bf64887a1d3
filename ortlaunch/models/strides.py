"""How a model's weights lie in memory."""

from __future__ import annotations

import torch
from torch import nn


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its part of the memory without gaps and overlaps, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def is_own(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own, so that it can be written; those of an expanded tensor have not."""
    return all(step != 0 or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def close_gaps(model: nn.Module) -> None:
    """Gives trained weights that have gaps in memory, as a part of a larger tensor has, contiguous memory of their own.

    torch's fused optimizers on the CPU go through the memory from end to end, and would update the wrong elements.
    Expanded buffers get it too: they can be neither sent to other workers nor loaded from a checkpoint.
    """
    for weight in model.parameters():
        if weight.requires_grad and weight.layout is torch.strided and not is_dense(weight):
            weight.data = weight.data.contiguous()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and not is_own(buffer):
                module._buffers[name] = buffer.contiguous()


def make_contiguous(model: nn.Module) -> None:
    """Makes all weights contiguous, for trainers that hold them in flat pieces."""
    for weight in model.parameters():
        weight.data = weight.data.contiguous()
