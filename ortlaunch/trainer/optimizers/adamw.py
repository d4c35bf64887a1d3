"""AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
    beta1: float = 0.9
    """How much of the mean of the gradients is kept from step to step."""
    beta2: float = 0.95
    """How much of the mean of their squares is kept from step to step."""
    eps: float = 1e-8
    """Added to the root of the latter, so that nothing is divided by zero."""

    can_be_resharded: ClassVar[bool] = True

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import AdamW

        return AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)

    def on_device(self) -> DeviceOptimizer:
        arguments = {"betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay}
        return DeviceOptimizer("AdamW", arguments, ("lr", "beta1", "beta2", "eps", "weight_decay"))
