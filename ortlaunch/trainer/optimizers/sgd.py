"""Stochastic gradient descent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import DeviceOptimizer, OptimizerConfig, ParameterGroups

if TYPE_CHECKING:
    from torch.optim import Optimizer


@option("optimizer")
@dataclass
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = number(0.9, least=0, below=1)
    """Share of the last update that is added to the next one."""

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import SGD

        from ortlaunch.trainer.optim import can_be_fused

        optimizer = SGD(groups, lr=self.lr, momentum=self.momentum, fused=can_be_fused(groups) or None)
        optimizer.register_step_pre_hook(_start_momentum)
        return optimizer

    def state_elements(self, shape: Sequence[int]) -> int:
        return math.prod(shape) if self.momentum else 0

    def on_device(self) -> DeviceOptimizer:
        for key, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay)):
            if value:
                raise RequestError(
                    f"optimizer.{key}={value:g}: ONNX Runtime's SGD on a device has none: set optimizer.{key}=0, "
                    "or use optimizer=adamw"
                )
        return DeviceOptimizer("SGD", {}, ("lr",))


def _start_momentum(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Starts the momentum of each parameter that has a gradient for the first time with zeros.

    The first update is then the gradient, as in torch. The fused kernel itself starts all parameters in one step: it
    raises an error if some get their first gradient later, and if that step is skipped for gradients that are not
    finite, it leaves memory that nothing has been written to as their momentum.
    """
    import torch

    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
