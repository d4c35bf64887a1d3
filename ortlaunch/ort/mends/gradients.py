"""Where gradients must not flow: ``Tensor.detach`` and ``torch.no_grad`` inside a model under ORTModule.

torch's exporter drops both, which is right for inference only: ONNX Runtime would train what eager leaves alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from onnx import helper
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.mends import convolutions, functions

_DOMAIN, _OPERATOR = "org.pytorch.aten", "detach_copy"


def install() -> None:
    """Makes the exporter keep ``detach`` and ORTModule ask for no gradient behind it; harmless to repeat."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    CustomGradientRegistry.register_custom_stop_gradient_edges([0], _DOMAIN, "ATen", _OPERATOR, "")
    register_custom_op_symbolic("aten::detach", stop_gradient, 17)
    if hasattr(GraphTransitionManager, "_ortlaunch_process"):
        return
    original = GraphTransitionManager._post_export_process

    def process(*, flatten_module: Any, exported_model_info: Any, **rest: Any) -> Any:
        frozen = {name for name, parameter in flatten_module.named_parameters() if not parameter.requires_grad}
        wanted = exported_model_info.onnx_graph_input_names_require_grad
        # ORTModule would ask for their gradients too in the first step, and build a second graph for the next.
        wanted = [name for name in wanted if name not in frozen]
        exported_model_info.onnx_graph_input_names_require_grad = wanted
        convolutions.pad_explicitly(exported_model_info.exported_model.graph)
        _separate_unwanted(exported_model_info.exported_model.graph, set(wanted))
        info = original(flatten_module=flatten_module, exported_model_info=exported_model_info, **rest)
        reached = _reached_by_gradients(info._post_export_processed_model.graph)
        for names in (
            info.onnx_graph_input_names_require_grad,
            info.onnx_graph_input_names_require_grad_user_defined,
        ):
            # ONNX Runtime refuses to differentiate with respect to what is only used detached; eager leaves it alone.
            names[:] = [name for name in names if name in reached]
        return info

    GraphTransitionManager._post_export_process = staticmethod(process)
    GraphTransitionManager._ortlaunch_process = process


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Within it, a model that is traced keeps gradients as in training, and where it switches them off, detaches."""
    # Nothing will be differentiated here, so nothing need be kept for it.
    forgetting = torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)
    with torch.enable_grad(), forgetting, _DetachesWhereGradientsAreOff():
        yield


def _nothing(_tensor: Any) -> Any:
    return None


class _DetachesWhereGradientsAreOff(TorchFunctionMode):
    """Follows the model's own switching of gradients.

    ``torch.is_grad_enabled`` does not tell it: while ``autograd.Function.apply`` runs a forward, and wraps an input
    that it returns (``view_as``), gradients are off though the Function is differentiated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:  # type: ignore[comparison-overlap]
            # Within a Function's forward it changes nothing of how the Function is differentiated.
            self._enabled = self._enabled if functions.is_running() else bool(args[0])
            return result
        if (self._enabled and not torch.is_inference_mode_enabled()) or func is Tensor.detach:
            return result
        if not any(x.requires_grad for x in _tensors((args, kwargs))):
            return result
        return _detached(result, args)


def _detached(result: Any, args: Any) -> Any:
    if isinstance(result, Tensor):
        # What was changed in place stays the tensor that it is.
        is_input = any(result is x for x in args)
        return result if is_input or not result.is_floating_point() else result.detach()
    if type(result) in (tuple, list):
        return type(result)(_detached(x, args) for x in result)
    return result


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def stop_gradient(g: Any, value: Any) -> Any:
    """A copy of `value` through which no gradient flows back."""
    # Not aten::detach itself: ONNX Runtime does not know that its result shares the memory, and may write into it.
    stopped = g.op(f"{_DOMAIN}::ATen", value, operator_s=_OPERATOR)
    stopped.setType(value.type())
    return stopped


def _separate_unwanted(graph: Any, wanted: set[str]) -> None:
    """Gives every ATen node that would write a gradient nobody wants a copy of its own to write it for.

    ONNX Runtime writes the gradients of ATen's inputs whether or not they are wanted: two such nodes with one input in
    common would both define it.
    """
    needing, seen = set(wanted), set()
    nodes = []
    for node in graph.node:
        if needing.intersection(node.input) and not _stops(node):
            needing.update(node.output)
        for index in _differentiated_inputs(node):
            name = node.input[index] if index < len(node.input) else ""
            if not name or name in needing:
                continue
            if name in seen:
                copy = f"{name}/copy_for/{node.output[0]}/{index}"
                nodes.append(helper.make_node("ATen", [name], [copy], name=copy, domain=_DOMAIN, operator=_OPERATOR))
                node.input[index] = copy
            seen.add(name)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _differentiated_inputs(node: Any) -> list[int]:
    """Which inputs of an ATen node its registered gradient writes to."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    if node.domain != _DOMAIN:
        return []
    texts = {a.name: a.s.decode() for a in node.attribute}
    key = f"{_DOMAIN}::ATen::{texts['operator']}::{texts.get('overload_name', '')}"
    written = [out for step in CustomGradientRegistry._GRADIENTS.get(key, ()) for out in step.outputs]
    return sorted(int(out[3:-1]) for out in written if out.startswith("GI("))


def _reached_by_gradients(graph: Any) -> set[str]:
    """Names of the values that some output depends on otherwise than through `stop_gradient`."""
    producers = {output: node for node in graph.node for output in node.output}
    waiting = [output.name for output in graph.output]
    reached = set(waiting)
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or _stops(node):
            continue
        new = set(node.input) - reached
        reached |= new
        waiting.extend(new)
    return reached


def _stops(node: Any) -> bool:
    return node.domain == _DOMAIN and any(a.name == "operator" and a.s.decode() == _OPERATOR for a in node.attribute)
