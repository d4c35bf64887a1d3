"""Draws the seeds of ONNX Runtime's random numbers from torch's generator in every training step.

By default each Dropout uses the seed after the previous one's, counted from torch's seed at the start. That has three
faults. Workers have consecutive seeds, so one would drop in a layer what the next one drops in the layer after it. A
restored state of torch, as in recomputation and resuming, would not restore the numbers. And on the CPU the first
element of every tensor would be dropped, or kept, for thousands of steps, because consecutive seeds begin with almost
the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DROPOUT = {"BiasDropout", "BiasSoftmaxDropout", "BitmaskBiasDropout", "BitmaskDropout", "Dropout"}
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def draws(graph: Any, *, with_dropout: bool = True) -> bool:
    """Whether an ``onnx.GraphProto`` has operators with random numbers of ONNX Runtime's own."""
    kinds = _RANDOM | _DROPOUT if with_dropout else _RANDOM
    return any(node.op_type in kinds for node in graph.node)


def seed_from_torch(set_seed: Callable[[int], None]) -> None:
    """Seeds ONNX Runtime with a number that is drawn from torch's generator.

    Args:
        set_seed: ONNX Runtime's function.
    """
    set_seed(int(torch.randint(2**31 - 2, (), dtype=torch.int64, device="cpu")) + 1)


def install() -> None:
    """Seeds ONNX Runtime before every run of a training graph that draws numbers; repeated calls do nothing."""
    from onnxruntime import set_seed
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    if hasattr(TrainingManager, "_ortlaunch_run"):
        return
    original = TrainingManager.execution_session_run_forward

    def run(execution_session: Any, onnx_model: Any, *args: Any) -> Any:
        if not hasattr(execution_session, "_ortlaunch_draws"):
            execution_session._ortlaunch_draws = draws(onnx_model.graph)
        # A graph without random operators leaves torch's generator as eager would.
        if execution_session._ortlaunch_draws:
            seed_from_torch(set_seed)
        return original(execution_session, onnx_model, *args)

    TrainingManager.execution_session_run_forward = staticmethod(run)
    TrainingManager._ortlaunch_run = run
