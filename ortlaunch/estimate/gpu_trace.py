"""Traces a run as on a GPU, on tensors of the CPU without content."""

from __future__ import annotations

from dataclasses import astuple, replace

from ortlaunch.config.schema import Config
from ortlaunch.config.trainers import trainer_of
from ortlaunch.estimate.ledger import Use
from ortlaunch.estimate.trace import Shapes, Trace, trace
from ortlaunch.trainer.workers import Workers


def gpu_trace(config: Config, workers: Workers, shapes: Shapes) -> Trace:
    """The memory of the first worker's tensors on its GPU.

    Args:
        config: the run's configuration.
        workers: this worker's place, as if there were others.
        shapes: of a micro-batch.

    Raises:
        RequestError: the model or the trainer refuses the request, as it would in a run.
        Exception: the model cannot be traced on fake tensors.
    """
    # Tensors of the host and of the GPU look the same here: the optimizer's state is traced as if it stayed.
    without = trainer_of(config.trainer).without_offload(config.trainer)
    found = trace(replace(config, trainer=without), workers, shapes, on_gpu=True)
    if without == config.trainer:
        return found
    parts = found.parts

    def without_state(use: Use) -> Use:
        return Use(*(max(parts.parameters, one - parts.optimizer_state) for one in astuple(use)))

    phases = {name: without_state(use) for name, use in found.phases.items()}
    return Trace(replace(parts, optimizer_state=0), phases)
