"""Batch normalization, whose statistics are buffers in fp32 that each worker moves by its own batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def with_statistics(model: nn.Module) -> list[_BatchNorm]:
    """The modules that normalize by statistics, with weights."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.affine and module.track_running_stats
    ]


def normalize_in_fp32(model: nn.Module) -> None:
    """Computes batch normalization with its weights cast to fp32, in place.

    For models whose parameters will be in bf16 or fp16 and whose buffers will not: torch's batch normalization takes
    weights and statistics in one precision only. Inputs and outputs keep theirs.
    """
    for module in with_statistics(model):
        module.forward = partial(type(module).forward, _InFp32(module))  # type: ignore[method-assign,arg-type]


class _InFp32:
    """Stands for a module in its forward."""

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module

    @property
    def weight(self) -> torch.Tensor:
        return self._module.weight.float()

    @property
    def bias(self) -> torch.Tensor:
        return self._module.bias.float()

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # A copy is being made, and has nothing yet.
            raise AttributeError(name)
        return getattr(self._module, name)
