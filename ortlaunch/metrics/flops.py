"""Floating-point operations of a model, and what devices reach at most."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ortlaunch.config.schema import Precision
from ortlaunch.trainer.task import Batch, Task

_DENSE_BF16_PEAK = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bf16/fp16 operations per second from NVIDIA's data sheets; the first name found in the device's counts."""


def flops_per_sample(model: torch.nn.Module, task: Task, batch: Batch) -> float:
    """Operations of forward and backward for one sample, a multiplication and an addition counted as two.

    Counts one forward pass of one sample with torch's FlopCounterMode; the backward pass of matrix products costs
    twice its forward.

    Args:
        model: the plain model, before any wrapping; left as it was.
        task: how the model is called.
        batch: tensors whose first dimension is the sample.
    """
    sample = {name: tensor[:1] for name, tensor in batch.items()}
    was_training = model.training
    # Evaluation mode draws no random numbers and moves no running statistics.
    model.eval()
    try:
        # The counter knows matrix products but not every fused attention (the CPU's, for one): the unfused form is
        # made of products.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            task.loss(model, sample)
    finally:
        model.train(was_training)
    return 3.0 * counter.get_total_flops()


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """The device's peak in operations per second at this precision; None where it is not known."""
    if device.type != "cuda" or precision is Precision.fp32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _DENSE_BF16_PEAK.items() if key in name), None)
