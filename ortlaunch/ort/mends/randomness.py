"""ONNX Runtime's random numbers, drawn from torch's in every training step.

Left alone, each Dropout takes the seed after the last one's, counted from torch's seed at the start. Workers, whose
seeds lie side by side, would then drop in one layer what their neighbour drops in the next; a seed restored with
torch's state, as recomputation and resuming do, would not bring the same numbers back; and on the CPU the first element
of every tensor would meet the same fate for thousands of steps, since neighbouring seeds begin with almost the same
number.
"""

from __future__ import annotations

from typing import Any

import torch

_RANDOM = {
    "BiasDropout",
    "BiasSoftmaxDropout",
    "BitmaskBiasDropout",
    "BitmaskDropout",
    "Dropout",
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def install() -> None:
    """Seeds ONNX Runtime before every run of a training graph that draws; harmless to repeat."""
    from onnxruntime import set_seed
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    if hasattr(TrainingManager, "_ortlaunch_run"):
        return
    original = TrainingManager.execution_session_run_forward

    def run(execution_session: Any, onnx_model: Any, *args: Any) -> Any:
        if not hasattr(execution_session, "_ortlaunch_draws"):
            execution_session._ortlaunch_draws = any(node.op_type in _RANDOM for node in onnx_model.graph.node)
        # A graph that draws nothing leaves torch's numbers as eager would find them.
        if execution_session._ortlaunch_draws:
            set_seed(int(torch.randint(2**31 - 2, (), dtype=torch.int64, device="cpu")) + 1)
        return original(execution_session, onnx_model, *args)

    TrainingManager.execution_session_run_forward = staticmethod(run)
    TrainingManager._ortlaunch_run = run
