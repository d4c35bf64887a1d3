"""Corrects the graph that ORTModule differentiates, and asks for no gradients that eager training does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from onnx import helper

from ortlaunch.ort.graphs import corrections, normalization
from ortlaunch.ort.graphs import gradients as flows
from ortlaunch.ort.graphs.nodes import ATEN
from ortlaunch.ort.operators import torch_nodes
from ortlaunch.ort.operators.aten_nodes import stop_gradient
from ortlaunch.ort.refusal import refusal


def install() -> None:
    """Makes the exporter keep ``detach``, and ORTModule request no gradient behind it; repeated calls do nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._training_manager import TrainingManager
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    CustomGradientRegistry.register_custom_stop_gradient_edges([0], ATEN[1], ATEN[0], flows.STOPS, "")
    register_custom_op_symbolic("aten::detach", stop_gradient, 17)
    if hasattr(GraphTransitionManager, "_ortlaunch_process"):
        return
    original = GraphTransitionManager._post_export_process

    def process(*, flatten_module: Any, exported_model_info: Any, **rest: Any) -> Any:
        frozen = {name for name, parameter in flatten_module.named_parameters() if not parameter.requires_grad}
        wanted = exported_model_info.onnx_graph_input_names_require_grad
        # ORTModule would request their gradients in the first step, and build a second graph for the next.
        wanted = [name for name in wanted if name not in frozen]
        exported_model_info.onnx_graph_input_names_require_grad = wanted
        model = exported_model_info.exported_model
        corrections.pad_explicitly(model.graph)
        if not any(entry.domain == ATEN[1] for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(ATEN[1], 1))
        normalization.avoid_fusion(model)
        flows.stop_before(model.graph, torch_nodes.choose_gradients(model.graph, set(wanted)))
        flows.slice_where_gradients_end(model.graph)
        flows.separate_unwanted(model.graph, set(wanted))
        flows.stop_twice(model.graph, set(wanted))
        info = original(flatten_module=flatten_module, exported_model_info=exported_model_info, **rest)
        graph = info._post_export_processed_model.graph
        outputs = [output.name for output in graph.output]
        reached = flows.reached_by_gradients(graph, outputs)
        of_model = outputs[: len(info.module_forward_output_schema.dtypes)]
        info._ortlaunch_reached = [flows.reached_by_gradients(graph, [name]).intersection(wanted) for name in of_model]
        for names in (
            info.onnx_graph_input_names_require_grad,
            info.onnx_graph_input_names_require_grad_user_defined,
        ):
            # ONNX Runtime refuses to differentiate with respect to weights that are only used detached.
            names[:] = [name for name in names if name in reached]
        return info

    GraphTransitionManager._post_export_process = staticmethod(process)
    GraphTransitionManager._ortlaunch_process = process
    make = TrainingManager._create_autofunction_class

    def made(self: Any) -> Any:
        function = make(self)
        backward = function.backward

        def asked(ctx: Any, *grads: Any) -> Any:
            refuse_second_derivatives()
            info = self._graph_transition_manager._post_export_processed_model_info
            return asked_for(info, grads, backward(ctx, *grads))

        function.backward = staticmethod(asked)
        return function

    TrainingManager._create_autofunction_class = made


def refuse_second_derivatives() -> None:
    """Raises in a backward that is to be differentiated (``create_graph=True``): its results would be constants."""
    if torch.is_grad_enabled():
        raise refusal(
            "the loss is computed from gradients of the model (create_graph=True, as for a gradient penalty), and ONNX "
            "Runtime's backward cannot be differentiated: use backend=eager"
        )


def asked_for(info: Any, grads: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients, but None for weights on which no output with a gradient depends.

    For an output that the loss does not use ONNX Runtime's backward takes zeros. The weights of that output alone would
    get zeros as well, and an optimizer would decay them, which it does not in eager.
    """
    asked = [names for names, grad in zip(info._ortlaunch_reached, grads, strict=False) if grad is not None]
    if len(asked) == len(info._ortlaunch_reached):
        return results
    names = set[str]().union(*asked)
    pairs = zip(info.onnx_graph_input_names, results, strict=True)
    return tuple(result if name in names else None for name, result in pairs)
