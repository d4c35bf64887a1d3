"""The engine of ``trainer=single``, and the base class of the engines that use torch's optimizer directly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.config.schema import Config, Precision
from ortlaunch.models.task import Task
from ortlaunch.trainer.average import Average
from ortlaunch.trainer.checkpoint import torch_state
from ortlaunch.trainer.checkpoint.host import HostMemory, to_host
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.given_optimizer import names_in, optimizer_of
from ortlaunch.trainer.gradients import clip_
from ortlaunch.trainer.guard import Guard
from ortlaunch.trainer.optimizers import masks_on_device, settings_kept, step_if
from ortlaunch.trainer.precision import autocast
from ortlaunch.trainer.schedules import rate_of
from ortlaunch.trainer.workers import Workers


class TorchEngine(Engine):
    """Trains on one worker. Subclasses override `_distribute` and `exchange` to train on several."""

    _in_pieces: str | None = None
    """As in `build_optimizer`."""

    def __init__(
        self,
        inner: torch.nn.Module,
        config: Config,
        workers: Workers,
        task: Task,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.inner = inner
        names = names_in(optimizer, inner)
        self.guard = Guard(workers.device)
        self._is_first = workers.is_first
        self._device_type = workers.device.type
        self._precision = config.train.precision
        self._trained_only = not config.adapter.trains_all
        self.module = self._distribute(config, workers)
        self.task = task
        self._parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
        self._optimizer, self._scheduler = optimizer_of(config, inner, optimizer, names, in_pieces=self._in_pieces)
        self._peak = config.optimizer.lr
        self._average = Average(inner, config.train.ema) if config.train.ema is not None else None
        self._masks_on_device = masks_on_device(self._optimizer, workers.device)
        self._accumulation = config.train.grad_accumulation
        self._clip = config.train.clip_grad_norm
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=self._precision is Precision.fp16)

    def _distribute(self, config: Config, workers: Workers) -> torch.nn.Module:
        """Returns the module that training calls, made from `inner`. It runs before the optimizer is built."""
        return self.inner

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._scaler.scale(self.guard.watch(loss) / self._accumulation).backward()

    def hold(self, weights: frozenset[torch.nn.Parameter], where: str) -> None:
        self.held = weights

    def step(self) -> torch.Tensor | float | None:
        for weight in self.held:
            # Neither the norm nor the optimizer knows a weight without a gradient.
            weight.grad = None
        self._scaler.unscale_(self._optimizer)
        norm = clip_(self._parameters, self._clip)
        finite = torch.isfinite(norm)
        if not self._scaler.is_enabled():
            self.guard.check_gradients(finite)
            if not self._masks_on_device:
                # `step_if` reads the flag on the host as well, so this adds no wait.
                self.known_discarded = not bool(finite)
        step_if(self._optimizer, finite, on_device=self._masks_on_device)
        if self._average is not None:
            self._average.update()
        self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._average.in_place() if self._average is not None else contextlib.nullcontext(), super().evaluating():
            yield

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self._device_type, self._precision)

    @property
    def lr(self) -> float:
        return rate_of(self._optimizer, self._scheduler, self._peak)

    @property
    def loss_scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler.is_enabled() else None

    def snapshot(self, folder: Path, *, shared: bool, memory: HostMemory) -> torch_state.Write:
        scheduler = {} if self._scheduler is None else self._scheduler.state_dict()
        rest: dict[str, Any] = {"scheduler": scheduler, "scaler": self._scaler.state_dict()}
        averages = {}
        if self._average is not None:
            rest["averaged"], averages = self._average.steps, self._average.tensors
        return torch_state.snapshot(
            self.inner,
            self._optimizer,
            averages,
            rest,
            folder,
            is_first=self._is_first,
            trained_only=self._trained_only,
            shared=shared,
            memory=memory,
        )

    def restore(self, folder: Path, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
        with settings_kept(self._optimizer, self._scheduler):
            rest = torch_state.restore(self.inner, self._optimizer, folder, group, trained_only=self._trained_only)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(rest["scheduler"])
        if self._scaler.is_enabled() and rest["scaler"]:
            self._scaler.load_state_dict(rest["scaler"])
        if self._average is not None:
            self._average.load(rest["averages"], rest.get("averaged", 0))

    def weights(self) -> dict[str, torch.Tensor]:
        if not self._is_first:
            return {}
        state = torch_state.state_of(self.inner, trained_only=self._trained_only)
        return dict(to_host({name: self._shown(value) for name, value in state.items()}, shared=True))

    def _shown(self, weight: torch.Tensor) -> torch.Tensor:
        """What is evaluated and left of a weight."""
        return self._average.of(weight) if self._average is not None else weight
