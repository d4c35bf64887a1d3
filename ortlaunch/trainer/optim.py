"""Optimizers and learning-rate schedules by configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from ortlaunch.config.schema import (
    AdamWConfig,
    CosineConfig,
    LinearConfig,
    OptimizerConfig,
    SchedulerConfig,
    SgdConfig,
)


def build_optimizer(parameters: Iterable[torch.nn.Parameter], cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters that require gradients, in torch's fused form."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(cfg, AdamWConfig):
        return torch.optim.AdamW(
            trainable,
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
        )
    assert isinstance(cfg, SgdConfig)
    return torch.optim.SGD(trainable, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, cfg: SchedulerConfig, steps: int) -> LambdaLR:
    """The schedule over `steps` optimizer steps; its step is taken after each optimizer step."""
    return LambdaLR(optimizer, lambda done: lr_ratio(cfg, done, steps))


def lr_ratio(cfg: SchedulerConfig, done: int, steps: int) -> float:
    """Share of the peak learning rate that the step after `done` finished ones gets.

    Rises in a straight line over the warm-up, the first step taking one part of it and not nothing; the decay ends
    with the last of `steps`.
    """
    if done < cfg.warmup_steps:
        return (done + 1) / (cfg.warmup_steps + 1)
    if not isinstance(cfg, LinearConfig | CosineConfig):
        return 1.0
    decay_steps = max(1, steps - 1 - cfg.warmup_steps)
    progress = min(1.0, (done - cfg.warmup_steps) / decay_steps)
    share = 1.0 - progress if isinstance(cfg, LinearConfig) else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.min_ratio + (1.0 - cfg.min_ratio) * share
