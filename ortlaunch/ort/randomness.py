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


def install() -> None:
    """Seeds ONNX Runtime before every training forward; harmless to repeat."""
    from onnxruntime import set_seed
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    if hasattr(TrainingManager, "_ortlaunch_forward"):
        return
    original = TrainingManager.forward

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        set_seed(int(torch.randint(2**31 - 2, (), dtype=torch.int64, device="cpu")) + 1)
        return original(self, *inputs, **kwargs)

    TrainingManager.forward = TrainingManager._ortlaunch_forward = forward
