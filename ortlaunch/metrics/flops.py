"""Counts the floating-point operations that a model needs for one sample, independent of the hardware."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ortlaunch.data.batch import part
from ortlaunch.models.modes import evaluation, untouched
from ortlaunch.models.task import Batch, Task, with_gradient

_PASSES = 3.0
"""Cost of forward and backward in forwards; the backward computes the gradients of a product's input and weight."""


def flops_per_sample(model: torch.nn.Module, task: Task, batch: Batch) -> float | None:
    """Counts the operations of forward and backward for one sample; a multiplication and an addition count as two.

    One forward pass of one sample is counted with torch's FlopCounterMode: matrix products, convolutions and attention.
    Element-wise operations and embedding look-ups are not counted. If all parameters are trained, the backward counts
    as two forwards. If some are frozen, the backward is counted as it runs, because it computes no gradients of frozen
    weights. Recomputed activations do not count.

    Args:
        model: the plain model, before any wrapping; it is not changed.
        task: how the model is called.
        batch: the first one. None is returned for one whose samples cannot be taken apart.
    """
    sample = part(batch, 0, 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_whole = len(trained) == len(list(model.parameters()))
    # The model must train as without the count: evaluation mode draws no random numbers and keeps running statistics
    # and all activations. The counter knows matrix products but not every fused attention, such as that of the CPU. The
    # unfused form consists of products.
    attention, counter = sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False)
    with untouched(model), evaluation(model), attention, counter:
        if is_whole or not trained:
            with torch.no_grad():
                task.loss(model, batch if sample is None else sample)
        else:
            torch.autograd.grad(
                with_gradient(task.loss(model, batch if sample is None else sample)), trained, allow_unused=True
            )
    return None if sample is None else (_PASSES if is_whole else 1.0) * counter.get_total_flops()
