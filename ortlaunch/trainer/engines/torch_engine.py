"""One worker alone, or DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ortlaunch.config.schema import Config, DdpConfig, Precision
from ortlaunch.models import registry
from ortlaunch.models.task import Batch, Task
from ortlaunch.trainer.checkpoint import torch_state
from ortlaunch.trainer.checkpoint.host import to_host
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.gradients import clip_
from ortlaunch.trainer.guard import Guard
from ortlaunch.trainer.optim import build_optimizer, masks_on_device, step_if
from ortlaunch.trainer.precision import autocast
from ortlaunch.trainer.schedule import build_scheduler
from ortlaunch.trainer.workers import Workers


class TorchEngine(Engine):
    """One worker alone, or DistributedDataParallel."""

    def __init__(
        self, inner: torch.nn.Module, config: Config, ddp: DdpConfig | None, workers: Workers, task: Task
    ) -> None:
        self.inner = inner
        self.guard = Guard(workers.device)
        self._ddp = _distribute(inner, ddp, workers, has_static_graph(config, ddp)) if ddp is not None else None
        self._is_first = workers.is_first
        self._module = self._ddp or inner
        self._task = task
        self._parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
        self._optimizer = build_optimizer(inner, config.optimizer)
        self._masks_on_device = masks_on_device(self._optimizer, workers.device)
        self._scheduler = build_scheduler(self._optimizer, config.scheduler, config.train.steps)
        self._accumulation = config.train.grad_accumulation
        self._clip = config.train.clip_grad_norm
        self._precision = config.train.precision
        self._device_type = workers.device.type
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=self._precision is Precision.fp16)

    def micro_step(self, batch: Batch, *, last: bool) -> torch.Tensor:
        # The forward counts too: DDP decides there whether the backward will exchange gradients.
        quiet = contextlib.nullcontext() if self._ddp is None or last else self._ddp.no_sync()
        with quiet:
            with self.precision_context():
                loss = self._task.loss(self._module, batch)
            self.forward_done()
            self._scaler.scale(self.guard.watch(loss) / self._accumulation).backward()
        return loss.detach()

    def step(self) -> torch.Tensor | float | None:
        self._scaler.unscale_(self._optimizer)
        norm = clip_(self._parameters, self._clip)
        finite = torch.isfinite(norm)
        if not self._scaler.is_enabled():
            self.guard.check_gradients(finite)
            self.tripped = not self._masks_on_device and not bool(finite)
        step_if(self._optimizer, finite, on_device=self._masks_on_device)
        self._scaler.update()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        if self._ddp is not None and self._ddp.modules_buffers:
            # Each worker's last batch has moved its own. As DDP does before a forward in training, so that what is
            # evaluated is one model: the first worker's, which checkpoints and weights hold.
            self._ddp._sync_buffers()
        with super().evaluating():
            yield

    def evaluate(self, batch: Batch) -> torch.Tensor:
        # Not through DDP: without gradients there is nothing left to exchange.
        with self.precision_context():
            return self._task.loss(self.inner, batch)

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self._device_type, self._precision)

    @property
    def lr(self) -> float:
        return float(self._scheduler.get_last_lr()[0])

    @property
    def loss_scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler.is_enabled() else None

    def snapshot(self, folder: Path) -> torch_state.Write:
        rest = {"scheduler": self._scheduler.state_dict(), "scaler": self._scaler.state_dict()}
        return torch_state.snapshot(self.inner, self._optimizer, rest, folder, is_first=self._is_first)

    def warm_up(self, batch: Batch) -> None:
        # DDP forms its buckets anew after the first backward, in the order in which gradients came. Where more than two
        # workers add up, the order in which they do follows from it: a resumed run needs the same buckets at once.
        if self._ddp is None:
            return
        # Of a static graph it learns the order in the second backward only.
        for _ in range(2):
            with self.precision_context():
                loss = self._task.loss(self._module, batch)
            loss.backward()
            self._optimizer.zero_grad(set_to_none=True)

    def restore(self, folder: Path, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
        rest = torch_state.restore(self.inner, self._optimizer, folder, group)
        self._scheduler.load_state_dict(rest["scheduler"])
        if self._scaler.is_enabled() and rest["scaler"]:
            self._scaler.load_state_dict(rest["scaler"])

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(to_host(self.inner.state_dict())) if self._is_first else {}


def has_static_graph(config: Config, cfg: DdpConfig) -> bool:
    """Whether DDP may take it that all steps are alike: as ``trainer.static_graph`` says, else for models known so.

    Not with micro-batches that exchange nothing: DDP learns the graph in the first backward, which would be one.
    """
    if cfg.static_graph is not None:
        return cfg.static_graph
    model = registry.find(config.model.name)
    return model is not None and model.static_graph and config.train.grad_accumulation == 1


def _distribute(
    inner: torch.nn.Module, cfg: DdpConfig, workers: Workers, static_graph: bool
) -> DistributedDataParallel:
    return DistributedDataParallel(
        inner,
        device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
        bucket_cap_mb=cfg.bucket_cap_mb,
        find_unused_parameters=cfg.find_unused_parameters,
        static_graph=static_graph,
        gradient_as_bucket_view=True,
    )
