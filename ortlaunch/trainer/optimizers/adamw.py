"""AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import DeviceOptimizer, OptimizerConfig, ParameterGroups

if TYPE_CHECKING:
    from torch.optim import Optimizer


@option("optimizer")
@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: str = "adamw"
    weight_decay: float = 0.01
    beta1: float = number(0.9, least=0, below=1)
    """Decay rate of the running mean of the gradients."""
    beta2: float = number(0.95, least=0, below=1)
    """Decay rate of the running mean of the squared gradients."""
    eps: float = number(1e-8, least=0)
    """Number that is added to the denominator of the update, so that it is never zero."""

    can_be_resharded: ClassVar[bool] = True

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import AdamW

        from ortlaunch.trainer.optim import can_be_fused

        return AdamW(
            groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=can_be_fused(groups) or None
        )

    def state_elements(self, shape: Sequence[int]) -> int:
        return 2 * math.prod(shape)

    def on_device(self) -> DeviceOptimizer:
        arguments = {"betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay}
        return DeviceOptimizer("AdamW", arguments, ("lr", "beta1", "beta2", "eps", "weight_decay"))
