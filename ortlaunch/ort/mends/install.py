"""Everything in which ORTModule is made to do what eager does, put in place together."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.mends import buffers, copying, functions, gradients, guard, modes, outputs, randomness, statistics

_exports_training: ContextVar[list[bool] | None] = ContextVar("_exports_training", default=None)
"""While a graph for training is made: the modes of the model's modules."""


def install() -> None:
    """Mends this process's ORTModule; harmless to repeat."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    gradients.install()
    statistics.register()
    outputs.install()
    copying.install()
    randomness.install()
    guard.install()
    if hasattr(_FlattenedModule, "_ortlaunch_forward"):
        return
    original_forward, original_export = _FlattenedModule.forward, GraphTransitionManager._get_exported_model

    def forward(self: Any, *args: Any) -> list[Tensor]:
        """The model's forward, which ORTModule calls to trace it, and before that to see the outputs."""
        flags = _exports_training.get()
        is_training = flags is not None
        if flags is not None:
            # The exporter has set all to train mode, frozen ones too.
            modes.set_modes(self._original_module, flags)
        tracked = gradients.tracked() if is_training else contextlib.nullcontext()
        with tracked, statistics.collected(self._original_module, is_training) as (names, batch_statistics):
            flat = original_forward(self, *args)
        # A graph for inference is made also of a model in train mode, where gradients are off.
        names, batch_statistics = (names, batch_statistics) if is_training else ([], [])
        self._output_schema = outputs.Outputs(self._output_schema, [x.dtype for x in flat], names)
        return [*flat, *batch_statistics]

    def export(*, flattened_module: Any, model_info_for_export: Any, **rest: Any) -> Any:
        is_training = model_info_for_export.export_mode == torch.onnx.TrainingMode.TRAINING
        model = flattened_module._original_module
        watched = buffers.watched(model) if is_training else contextlib.nullcontext()
        with modes.kept(model) as flags, watched, functions.watched():
            token = _exports_training.set(flags if is_training else None)
            try:
                return original_export(
                    flattened_module=flattened_module, model_info_for_export=model_info_for_export, **rest
                )
            finally:
                _exports_training.reset(token)

    _FlattenedModule.forward = _FlattenedModule._ortlaunch_forward = forward
    GraphTransitionManager._get_exported_model = staticmethod(export)
