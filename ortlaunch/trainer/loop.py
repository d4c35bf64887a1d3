"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ortlaunch.config.schema import TrainConfig
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.task import Batch


def train(
    engine: Engine,
    batches: Iterator[Batch],
    cfg: TrainConfig,
    device: torch.device,
    recorder: Recorder,
    first_step_done: Callable[[], None],
) -> None:
    """Takes ``cfg.steps`` optimizer steps.

    Args:
        engine: the wrapped model.
        batches: endless micro-batches of this worker.
        cfg: how long, and how many micro-batches to a step.
        device: where the batches go.
        recorder: counts and journals.
        first_step_done: called once, before the first step is journalled.
    """
    recorder.restart_clock()
    for step in range(1, cfg.steps + 1):
        lr = engine.lr
        loss = _accumulate(engine, batches, cfg.grad_accumulation, device, recorder)
        grad_norm = engine.step()
        recorder.step_done()
        if step == 1:
            first_step_done()
        if recorder.is_log_step(step):
            recorder.log(step, loss, grad_norm, lr)
    recorder.finish(cfg.steps)


def _accumulate(
    engine: Engine, batches: Iterator[Batch], count: int, device: torch.device, recorder: Recorder
) -> torch.Tensor:
    """Forward and backward over the micro-batches of one step; returns their mean loss, still on the device."""
    total = torch.zeros((), device=device)
    for index in range(count):
        waiting_since = time.perf_counter()
        batch = next(batches)
        recorder.waited_for_data(time.perf_counter() - waiting_since)
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        recorder.micro_batch(batch)
        total += engine.micro_step(batch, last=index == count - 1)
    return total / count
