"""What the loop drives: a wrapped model with its optimizer, one class per way of sharing the training."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel

from ortlaunch.config.schema import Config, DdpConfig, DeepSpeedConfig, Precision
from ortlaunch.trainer.optim import build_optimizer, build_scheduler
from ortlaunch.trainer.task import Batch, Task
from ortlaunch.trainer.workers import Workers

_AUTOCAST = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


class Engine(ABC):
    """Forward, backward and optimizer step of one worker."""

    inner: torch.nn.Module
    """What the backend returned: the plain model, or an ORTModule."""

    @abstractmethod
    def micro_step(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch.

        Args:
            batch: tensors on this worker's device.
            last: whether the optimizer step follows; workers exchange gradients only then.

        Returns:
            The micro-batch's loss, a detached scalar on the device.
        """

    @abstractmethod
    def step(self) -> torch.Tensor | float | None:
        """Clips, updates the weights, moves the schedule and clears the gradients.

        Returns:
            The gradient norm over all workers before clipping; None where clipping is off. Not yet read from the
            device where it lies on one.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate that the next step will use."""

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        """What `micro_step` calls the model in: autocast, where the engine does it that way."""
        return contextlib.nullcontext()


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
            with self.precision_context():
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

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision is Precision.fp32:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=_AUTOCAST[self._precision])


class DeepSpeedEngine(Engine):
    """DeepSpeed with ZeRO 0 to 3."""

    def __init__(
        self, inner: torch.nn.Module, config: Config, cfg: DeepSpeedConfig, workers: Workers, task: Task
    ) -> None:
        import deepspeed

        # On the CPU it would compile a shared-memory collective of its own at the first run, for half a minute; that
        # spins, needs a compiler, and trains no faster than gloo (gpt2_nano, ZeRO 1, two workers on four cores).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.inner = inner
        self._task = task
        optimizer = build_optimizer(inner.parameters(), config.optimizer)
        scheduler = build_scheduler(optimizer, config.scheduler, config.train.steps)
        # What it prints belongs into the log, not on the terminal.
        with contextlib.redirect_stdout(sys.stderr):
            self._engine, _, _, _ = deepspeed.initialize(
                model=inner,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                config=deepspeed_config(config, cfg),
                dist_init_required=False,
            )
        self._scheduler = scheduler
        self._clip = config.train.clip_grad_norm
        self._clips_itself = not _clips_for_deepspeed(config, cfg)
        self._parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]

    def micro_step(self, batch: Batch, *, last: bool) -> torch.Tensor:
        # DeepSpeed counts the micro-batches itself and exchanges gradients at the last.
        loss = self._task.loss(self._engine, batch)
        self._engine.backward(loss)
        if not last:
            self._engine.step()
        return loss.detach()

    def step(self) -> torch.Tensor | float | None:
        norm: torch.Tensor | float | None = None
        if self._clip is not None and not self._clips_itself:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._engine.step()
        if self._clip is not None and self._clips_itself:
            norm = self._engine.get_global_grad_norm()
        return norm

    @property
    def lr(self) -> float:
        return float(self._scheduler.get_last_lr()[0])


def deepspeed_config(config: Config, cfg: DeepSpeedConfig) -> dict[str, Any]:
    """DeepSpeed's configuration for this run, with the user's ``trainer.config`` merged over it.

    https://www.deepspeed.ai/docs/config-json/
    """
    generated = {
        "train_micro_batch_size_per_gpu": config.train.batch_size,
        "gradient_accumulation_steps": config.train.grad_accumulation,
        "gradient_clipping": 0.0 if _clips_for_deepspeed(config, cfg) else config.train.clip_grad_norm or 0.0,
        "zero_optimization": {"stage": cfg.zero_stage},
        "bf16": {"enabled": config.train.precision is Precision.bf16},
        "fp16": {"enabled": config.train.precision is Precision.fp16},
        # Our optimizers are torch's own, also on the CPU and also those that DeepSpeed has not tested.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Its timer waits for the device twice per micro-step.
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31 - 1,
    }
    merged = OmegaConf.to_container(OmegaConf.merge(generated, cfg.config), resolve=True)
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _clips_for_deepspeed(config: Config, cfg: DeepSpeedConfig) -> bool:
    """Whether we clip: at stage 0 in fp32 DeepSpeed does too, but keeps the norm to itself."""
    return cfg.zero_stage == 0 and config.train.precision is Precision.fp32


def _distribute(inner: torch.nn.Module, cfg: DdpConfig, workers: Workers) -> DistributedDataParallel:
    return DistributedDataParallel(
        inner,
        device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
        bucket_cap_mb=cfg.bucket_cap_mb,
        find_unused_parameters=cfg.find_unused_parameters,
        static_graph=cfg.static_graph,
        gradient_as_bucket_view=True,
    )
