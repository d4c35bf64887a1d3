"""Floating-point operations of a model for one sample: those that its mathematics needs, whatever the hardware does."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ortlaunch.models.task import Batch, Task

_PASSES = 3.0
"""Forward, and a backward that costs twice as much: gradients of a product's input and of its weight."""


def flops_per_sample(model: torch.nn.Module, task: Task, batch: Batch) -> float:
    """Operations of forward and backward for one sample, a multiplication and an addition counted as two.

    Counts one forward pass of one sample with torch's FlopCounterMode: matrix products, convolutions and attention.
    What is done element by element, and the look-up in an embedding, are not counted. The backward of a model that
    trains all its parameters counts as two forwards; of one with frozen parameters it is counted as it is, for it needs
    no gradients of frozen weights. Activations that are computed again for the backward do not count.

    Args:
        model: the plain model, before any wrapping; left as it was.
        task: how the model is called.
        batch: tensors whose first dimension is the sample.
    """
    sample = {name: tensor[:1] for name, tensor in batch.items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_whole = len(trained) == len(list(model.parameters()))
    was_training = model.training
    # Evaluation mode draws no random numbers, moves no running statistics and keeps all activations.
    model.eval()
    try:
        # The counter knows matrix products but not every fused attention (the CPU's, for one): the unfused form is
        # made of products.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            if is_whole or not trained:
                with torch.no_grad():
                    task.loss(model, sample)
            else:
                torch.autograd.grad(task.loss(model, sample), trained, allow_unused=True)
    finally:
        model.train(was_training)
    return (_PASSES if is_whole else 1.0) * counter.get_total_flops()
