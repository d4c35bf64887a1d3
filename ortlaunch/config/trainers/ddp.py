"""``trainer=ddp``: torch's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.bounds import number
from ortlaunch.config.trainers.base import Trainer, TrainerConfig

if TYPE_CHECKING:
    from ortlaunch.config.schema import Config, Device


@dataclass(eq=False, repr=False)
class DdpConfig(TrainerConfig):
    """torch's DistributedDataParallel."""

    name: str = "ddp"
    bucket_cap_mb: int = number(25, least=1, most=1_000_000)
    """Size in MB of the buckets in which gradients are exchanged."""
    find_unused_parameters: bool = False
    """Search in every step for parameters that did not contribute to the loss. This is slower, and needed only by
    models that have such parameters."""
    static_graph: bool | None = None
    """Whether every step uses the same parameters in the same way, so that DDP need not search for unused ones; null
    means yes for the built-in models that do, unless train.grad_accumulation is more than 1."""
    shared_memory: bool = True
    """Exchange gradients on the CPU between up to four workers of one machine through memory that they share; false
    means through gloo, as between machines."""


class DdpTrainer(Trainer[DdpConfig]):
    """Every worker holds the whole model, and gradients are averaged over the workers."""

    schema = DdpConfig
    engine = "ortlaunch.trainer.engines.ddp_engine:DdpEngine"

    def check(self, config: Config, device: Device) -> None:
        count = config.train.grad_accumulation
        if getattr(config.trainer, "static_graph", None) and count > 1:
            raise RequestError(
                f"trainer.static_graph=true does not go with train.grad_accumulation={count}: DDP learns the graph in "
                "the first backward, which exchanges no gradients then: leave it out"
            )
