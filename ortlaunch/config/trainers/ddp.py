"""``trainer=ddp``: torch's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.config.trainers.base import Trainer, TrainerConfig


@dataclass
class DdpConfig(TrainerConfig):
    """torch's DistributedDataParallel."""

    name: str = "ddp"
    bucket_cap_mb: int = 25
    """Size of the packets in which gradients are exchanged, in MB."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that took no part in the loss; needed by models that have such, and slower."""
    static_graph: bool | None = None
    """Whether every step uses the same parameters in the same way, which spares DDP the search; null says yes for the
    models of ours that do."""


class DdpTrainer(Trainer[DdpConfig]):
    """Every worker holds the whole model; gradients are averaged."""

    schema = DdpConfig
    engine = "ortlaunch.trainer.engines.ddp_engine:DdpEngine"
