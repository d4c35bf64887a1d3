"""Everything in which ORTModule is made to do what eager does, put in place together."""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort import gradients, statistics, symbolics


def install() -> None:
    """Mends this process's ORTModule; harmless to repeat."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    symbolics.register()
    gradients.install()
    statistics.install()
    if hasattr(GraphTransitionManager, "_ortlaunch_mended_export"):
        return
    original = GraphTransitionManager._get_exported_model

    def export(*, flattened_module: Any, model_info_for_export: Any, **rest: Any) -> Any:
        training = model_info_for_export.export_mode == torch.onnx.TrainingMode.TRAINING
        with statistics.collecting(training):
            return original(flattened_module=flattened_module, model_info_for_export=model_info_for_export, **rest)

    GraphTransitionManager._get_exported_model = staticmethod(export)
    GraphTransitionManager._ortlaunch_mended_export = export
