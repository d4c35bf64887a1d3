"""``trainer=single``: one worker, no communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.trainers.base import Trainer, TrainerConfig

if TYPE_CHECKING:
    from ortlaunch.config.schema import Config, Device


@dataclass(eq=False, repr=False)
class SingleConfig(TrainerConfig):
    """One worker, no communication."""

    name: str = "single"


class SingleTrainer(Trainer[SingleConfig]):
    """One worker."""

    schema = SingleConfig
    engine = "ortlaunch.trainer.engines.torch_engine:TorchEngine"
    has_one_worker = True

    def check(self, config: Config, device: Device) -> None:
        nodes, wanted = config.launcher.nodes, config.launcher.workers_per_node
        asked = f"launcher.workers_per_node={wanted}" if wanted not in (None, 1) else None
        asked = asked or (f"launcher.nodes={nodes}" if nodes > 1 else None)
        if asked is not None:
            raise RequestError(
                f"trainer=single runs one worker and {asked} asks for more: choose trainer=ddp or trainer=deepspeed"
            )
