"""DeepSpeed with ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from omegaconf import OmegaConf

from ortlaunch.config.schema import Config, DeepSpeedConfig, Precision
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.optim import build_optimizer, build_scheduler
from ortlaunch.trainer.task import Batch, Task
from ortlaunch.trainer.workers import Workers


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
