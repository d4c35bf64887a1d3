"""One worker alone, or DistributedDataParallel."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ortlaunch.config.schema import Config, DdpConfig, Precision
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.optim import build_optimizer, build_scheduler
from ortlaunch.trainer.task import Batch, Task
from ortlaunch.trainer.workers import Workers

_AUTOCAST = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


class TorchEngine(Engine):
    """One worker alone, or DistributedDataParallel."""

    def __init__(
        self, inner: torch.nn.Module, config: Config, ddp: DdpConfig | None, workers: Workers, task: Task
    ) -> None:
        self.inner = inner
        self._ddp = _distribute(inner, ddp, workers) if ddp is not None else None
        self._module = self._ddp or inner
        self._task = task
        self._parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
        self._optimizer = build_optimizer(self._parameters, config.optimizer)
        self._scheduler = build_scheduler(self._optimizer, config.scheduler, config.train.steps)
        self._accumulation = config.train.grad_accumulation
        self._clip = config.train.clip_grad_norm
        self._device_type = workers.device.type
        self._precision = config.train.precision
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=self._precision is Precision.fp16)

    def micro_step(self, batch: Batch, *, last: bool) -> torch.Tensor:
        quiet = contextlib.nullcontext() if self._ddp is None or last else self._ddp.no_sync()
        with quiet:
            with self._autocast():
                loss = self._task.loss(self._module, batch)
            self._scaler.scale(loss / self._accumulation).backward()
        return loss.detach()

    def step(self) -> torch.Tensor | float | None:
        norm = None
        if self._clip is not None:
            self._scaler.unscale_(self._optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @property
    def lr(self) -> float:
        return float(self._scheduler.get_last_lr()[0])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision is Precision.fp32:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=_AUTOCAST[self._precision])


def _distribute(inner: torch.nn.Module, cfg: DdpConfig, workers: Workers) -> DistributedDataParallel:
    return DistributedDataParallel(
        inner,
        device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
        bucket_cap_mb=cfg.bucket_cap_mb,
        find_unused_parameters=cfg.find_unused_parameters,
        static_graph=cfg.static_graph,
        gradient_as_bucket_view=True,
    )
