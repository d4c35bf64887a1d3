"""torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ortlaunch.config.schema import Config
from ortlaunch.config.trainers.ddp import DdpConfig
from ortlaunch.models import registry
from ortlaunch.models.task import Batch
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.workers import Workers


class DdpEngine(TorchEngine):
    """Every worker holds the whole model; gradients are averaged over them."""

    _module: DistributedDataParallel

    def _distribute(self, config: Config, workers: Workers) -> DistributedDataParallel:
        cfg = config.trainer
        assert isinstance(cfg, DdpConfig)
        return DistributedDataParallel(
            self.inner,
            device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
            bucket_cap_mb=cfg.bucket_cap_mb,
            find_unused_parameters=cfg.find_unused_parameters,
            static_graph=has_static_graph(config, cfg),
            gradient_as_bucket_view=True,
        )

    def _exchange(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        # Around the forward too: DDP decides there whether the backward will exchange gradients.
        return contextlib.nullcontext() if last else self._module.no_sync()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        if self._module.modules_buffers:
            # Each worker's last batch has moved its own. As DDP does before a forward in training, so that what is
            # evaluated is one model: the first worker's, which checkpoints and weights hold.
            self._module._sync_buffers()
        with super().evaluating():
            yield

    def warm_up(self, batch: Batch) -> None:
        # DDP forms its buckets anew after the first backward, in the order in which gradients came. Where more than two
        # workers add up, the order in which they do follows from it: a resumed run needs the same buckets at once.
        # Of a static graph it learns the order in the second backward only.
        for _ in range(2):
            self._loss(batch).backward()
            self._optimizer.zero_grad(set_to_none=True)


def has_static_graph(config: Config, cfg: DdpConfig) -> bool:
    """Whether DDP may take it that all steps are alike: as ``trainer.static_graph`` says, else for models known so.

    Not with micro-batches that exchange nothing: DDP learns the graph in the first backward, which would be one.
    """
    if cfg.static_graph is not None:
        return cfg.static_graph
    model = registry.find(config.model.name)
    return model is not None and model.static_graph and config.train.grad_accumulation == 1
