"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
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
    momentum: float = 0.9
    """Share of the last update that is added to the next one."""

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import SGD

        return SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)

    def on_device(self) -> DeviceOptimizer:
        for key, number in (("momentum", self.momentum), ("weight_decay", self.weight_decay)):
            if number:
                raise RequestError(
                    f"optimizer.{key}={number:g}: ONNX Runtime's SGD on a device has none: set optimizer.{key}=0, "
                    "or use optimizer=adamw"
                )
        return DeviceOptimizer("SGD", {}, ("lr",))
