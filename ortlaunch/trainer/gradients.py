"""Norm and clipping of gradients, whole or sharded over the workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_(parameters: Iterable[torch.nn.Parameter], largest: float | None) -> torch.Tensor:
    """Scales all gradients by one factor so that their norm is at most `largest`; None changes nothing.

    Returns:
        Their 2-norm over all workers' shards before, a scalar on the device.
    """
    graded = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in graded if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if largest is not None:
        clip_grads_with_norm_(graded, largest, norm)
    return norm
