"""Installs all corrections of ORTModule together."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.mends import (
    buffers,
    copying,
    functions,
    gradients,
    guard,
    modes,
    outputs,
    randomness,
    side_effects,
    statistics,
)

_exports_training: ContextVar[list[bool] | None] = ContextVar("_exports_training", default=None)
"""The modes of the model's modules while a graph for training is made."""


def install() -> None:
    """Corrects this process's ORTModule; repeated calls do nothing."""
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
        """Runs the model's forward, which ORTModule calls to find the outputs and then to trace the model."""
        flags = _exports_training.get()
        is_training = flags is not None
        if flags is not None:
            # The exporter has set all modules to train mode, including those in eval mode.
            modes.set_modes(self._original_module, flags)
        tracked = gradients.tracked() if is_training else contextlib.nullcontext()
        refusing = side_effects.RefusesSideEffects(self._original_module) if is_training else contextlib.nullcontext()
        with tracked, refusing, statistics.collected(self._original_module, is_training) as (names, batch_statistics):
            flat = original_forward(self, *args)
        # ORTModule also makes a graph for inference of a model in train mode, if gradients are off.
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
