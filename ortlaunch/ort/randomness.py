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
    "Dropout",
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def install() -> None:
    """Seeds ONNX Runtime before every run of a graph that draws; harmless to repeat."""
    from onnxruntime import set_seed
    from onnxruntime.training.ortmodule._graph_transition_manager import PostExportProcessedModelInfo

    if hasattr(PostExportProcessedModelInfo, "_ortlaunch_construct"):
        return
    original = PostExportProcessedModelInfo.construct_inputs

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_ortlaunch_draws"):
            self._ortlaunch_draws = any(n.op_type in _RANDOM for n in self._post_export_processed_model.graph.node)
        # A graph that draws nothing leaves torch's numbers as eager would find them.
        if self._ortlaunch_draws:
            set_seed(int(torch.randint(2**31 - 2, (), dtype=torch.int64, device="cpu")) + 1)
        return original(self, *args, **kwargs)

    PostExportProcessedModelInfo.construct_inputs = PostExportProcessedModelInfo._ortlaunch_construct = construct
