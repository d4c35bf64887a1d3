"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

        return SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)

    def on_device(self) -> DeviceOptimizer:
        for key, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay)):
            if value:
                raise RequestError(
                    f"optimizer.{key}={value:g}: ONNX Runtime's SGD on a device has none: set optimizer.{key}=0, "
                    "or use optimizer=adamw"
                )
        return DeviceOptimizer("SGD", {}, ("lr",))
