"""Norm and clipping of gradients that are not sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_(parameters: Iterable[torch.nn.Parameter], largest: float | None) -> torch.Tensor:
    """Scales all gradients by one factor so that their norm is at most `largest`; None changes nothing.

    Returns:
        The 2-norm of all gradients before clipping, a scalar on the device.
    """
    graded = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in graded if parameter.grad is not None])
    if largest is not None:
        clip_grads_with_norm_(graded, largest, norm)
    return norm
