"""Everything in which ORTModule is made to do what eager does, put in place together."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort import buffers, copying, functions, gradients, outputs, randomness, statistics, symbolics

_exports_training: ContextVar[bool] = ContextVar("_exports_training", default=False)


def install() -> None:
    """Mends this process's ORTModule; harmless to repeat."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    symbolics.register()
    gradients.install()
    statistics.register()
    outputs.install()
    copying.install()
    randomness.install()
    if hasattr(_FlattenedModule, "_ortlaunch_forward"):
        return
    original_forward, original_export = _FlattenedModule.forward, GraphTransitionManager._get_exported_model

    def forward(self: Any, *args: Any) -> list[Tensor]:
        """The model's forward, which ORTModule calls to trace it, and before that to see the outputs."""
        is_training = _exports_training.get()
        tracked = gradients.tracked() if is_training else contextlib.nullcontext()
        with tracked, statistics.collected(self._original_module) as (names, batch_statistics):
            flat = original_forward(self, *args)
        # A graph for inference is made also of a model in train mode, where gradients are off.
        names, batch_statistics = (names, batch_statistics) if is_training else ([], [])
        self._output_schema = outputs.Outputs(self._output_schema, [x.dtype for x in flat], names)
        return [*flat, *batch_statistics]

    def export(*, flattened_module: Any, model_info_for_export: Any, **rest: Any) -> Any:
        is_training = model_info_for_export.export_mode == torch.onnx.TrainingMode.TRAINING
        token = _exports_training.set(is_training)
        watched = buffers.watched(flattened_module._original_module) if is_training else contextlib.nullcontext()
        try:
            with watched, functions.watched():
                return original_export(
                    flattened_module=flattened_module, model_info_for_export=model_info_for_export, **rest
                )
        finally:
            _exports_training.reset(token)

    _FlattenedModule.forward = _FlattenedModule._ortlaunch_forward = forward
    GraphTransitionManager._get_exported_model = staticmethod(export)
