"""Everything in which ORTModule is made to do what eager does, put in place together."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort import buffers, copying, functions, gradients, randomness, statistics, symbolics

_exports_training: ContextVar[bool] = ContextVar("_exports_training", default=False)


def install() -> None:
    """Mends this process's ORTModule; harmless to repeat."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    symbolics.register()
    gradients.install()
    statistics.install()
    copying.install()
    randomness.install()
    if hasattr(_FlattenedModule, "_ortlaunch_forward"):
        return
    original_forward, original_export = _FlattenedModule.forward, GraphTransitionManager._get_exported_model

    def forward(self: Any, *args: Any) -> list[Tensor]:
        """The model's forward, which ORTModule calls to trace it, and before that to see the outputs."""
        modules: list[str] = []
        statistics_outputs: list[Tensor] = []
        # A graph for inference is made also of a model in train mode, where gradients are off.
        if _exports_training.get():
            with gradients.tracked(), statistics.collected(self._original_module) as (modules, statistics_outputs):
                outputs = original_forward(self, *args)
        else:
            with statistics.collected(self._original_module):
                outputs = original_forward(self, *args)
        self._output_schema = statistics.WithStatistics(self._output_schema, modules)
        return [*outputs, *statistics_outputs]

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
