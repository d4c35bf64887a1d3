"""Adafactor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import OptimizerConfig, ParameterGroups

if TYPE_CHECKING:
    from torch.optim import Optimizer


@option("optimizer")
@dataclass
class AdafactorConfig(OptimizerConfig):
    """torch's Adafactor (Shazeer and Stern, 2018), which stores a matrix's second moments as one row and one column."""

    name: str = "adafactor"
    lr: float = 0.01
    beta2_decay: float = number(-0.8, most=0)
    """Exponent of the decay rate: beta2 at a step is 1 - step ** beta2_decay."""
    clip_threshold: float = number(1.0, least=1)
    """Largest root mean square of a parameter's update."""

    whole_matrices: ClassVar[str | None] = "Adafactor needs the rows and columns of whole matrices"

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import Adafactor

        return Adafactor(groups, lr=self.lr, beta2_decay=self.beta2_decay, d=self.clip_threshold)

    def state_elements(self, shape: Sequence[int]) -> int:
        if len(shape) < 2:
            return math.prod(shape)
        *matrices, rows, columns = shape
        return math.prod(matrices) * (rows + columns)
