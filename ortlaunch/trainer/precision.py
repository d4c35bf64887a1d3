"""The number formats of forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ortlaunch.config.schema import Precision
from ortlaunch.data.batch import Batch, labels, mapped

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def autocast(device_type: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """The autocast context of the forward pass, for weights that stay in fp32."""
    if precision is Precision.fp32:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[precision])


def cast_inputs(batch: Batch, precision: Precision) -> Batch:
    """The batch with its floating-point inputs cast to the format of the weights; labels keep theirs."""
    if precision is Precision.fp32:
        return batch
    kept = labels(batch)
    return mapped(batch, lambda one: one.to(DTYPES[precision]) if one.is_floating_point() and one is not kept else one)
