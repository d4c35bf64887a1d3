"""Stops gradients at ``Tensor.detach`` and in ``torch.no_grad`` inside a model under ORTModule.

torch's exporter drops both, which is right only for inference. ONNX Runtime would train weights that eager does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from onnx import helper, numpy_helper
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.mends import convolutions, functions, normalization, splits, torch_nodes
from ortlaunch.ort.refusal import refusal
from ortlaunch.ort.verify.reference import asking_place
from ortlaunch.ort.verify.trace import location, statement_at

_DOMAIN, _OPERATOR = "org.pytorch.aten", "detach_copy"
_IN_PLACE = ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")))
"""Methods that change a tensor and whose names do not end as those of the others."""
_SMALL = 1024
"""Bytes up to which two initializers are compared by their values."""


def install() -> None:
    """Makes the exporter keep ``detach``, and ORTModule request no gradient behind it; repeated calls do nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._training_manager import TrainingManager
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    CustomGradientRegistry.register_custom_stop_gradient_edges([0], _DOMAIN, "ATen", _OPERATOR, "")
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
        convolutions.pad_explicitly(model.graph)
        if not any(entry.domain == _DOMAIN for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
        normalization.avoid_fusion(model)
        _stop_before(model.graph, torch_nodes.choose_gradients(model.graph, set(wanted)))
        splits.slice_where_gradients_end(model.graph, _stops, _stopped)
        _separate_unwanted(model.graph, set(wanted))
        _stop_twice(model.graph, set(wanted))
        info = original(flatten_module=flatten_module, exported_model_info=exported_model_info, **rest)
        graph = info._post_export_processed_model.graph
        outputs = [output.name for output in graph.output]
        reached = _reached_by_gradients(graph, outputs)
        of_model = outputs[: len(info.module_forward_output_schema.dtypes)]
        info._ortlaunch_reached = [_reached_by_gradients(graph, [name]).intersection(wanted) for name in of_model]
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


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Traces a model with gradients as in training, and detaches results where the model switches gradients off."""
    # Nothing is differentiated here, so no tensors need be saved.
    forgetting = torch.autograd.graph.saved_tensors_hooks(_nothing, refuse_gradients)
    with torch.enable_grad(), forgetting, _DetachesWhereGradientsAreOff():
        yield


def _nothing(_tensor: Any) -> Any:
    return None


def refuse_gradients(*_nothing_saved: Any) -> Any:
    """Raises at a call that differentiates in forward; the message names its line."""
    place = asking_place()
    raise refusal(
        f"`{statement_at(*place)}` at {location(place)} computes gradients in forward, and ONNX Runtime's graph has no "
        "gradients of gradients: use backend=eager or backend=compile"
    )


class _DetachesWhereGradientsAreOff(TorchFunctionMode):
    """Follows the model's own switching of gradients.

    ``torch.is_grad_enabled`` does not show it. While ``autograd.Function.apply`` runs a forward, and wraps a returned
    input (``view_as``), gradients are off although the Function is differentiated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._enabled and func in functions.DETACH and functions.passes_detach():
            return args[0]
        has_gradients = self._enabled and not torch.is_inference_mode_enabled()
        if not has_gradients and _is_in_place(func):
            # What is changed, such as a buffer, gets values and no gradients.
            args, kwargs = (*args[:1], *_detached(args[1:], ())), _detached(kwargs or {}, ())
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:  # type: ignore[comparison-overlap]
            # In a Function's forward the switch has no effect on how the Function is differentiated.
            self._enabled = self._enabled if functions.is_running() else bool(args[0])
            return result
        if has_gradients or func is Tensor.detach:
            return result
        if not any(x.requires_grad for x in _tensors((args, kwargs))):
            return result
        return _detached(result, args)


def _detached(result: Any, args: Any) -> Any:
    if isinstance(result, Tensor):
        # A tensor that was changed in place must stay the same object.
        is_input = any(result is x for x in args)
        return result if is_input or not result.is_floating_point() else result.detach()
    if type(result) in (tuple, list):
        return type(result)(_detached(x, args) for x in result)
    if type(result) is dict:
        return {name: _detached(x, args) for name, x in result.items()}
    return result


def _is_in_place(func: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def stop_gradient(g: Any, value: Any) -> Any:
    """Exports a copy of `value` through which no gradient flows back."""
    # aten::detach is not used: ONNX Runtime does not know that its result shares memory, and may overwrite it.
    stopped = g.op(f"{_DOMAIN}::ATen", value, operator_s=_OPERATOR)
    stopped.setType(value.type())
    return stopped


def _separate_unwanted(graph: Any, wanted: set[str]) -> None:
    """Gives nodes a copy of each input whose gradient they write although nobody needs it.

    ONNX Runtime writes the gradients of all inputs of an ATen node, a BatchNorm or a Concat, needed or not. Two such
    nodes with a common input would both define its gradient. Inputs that are computed twice alike count as common: ONNX
    Runtime computes them once.
    """
    needing, seen = set(wanted), set()
    expressions = _Expressions(graph)
    nodes = []
    for node in graph.node:
        expressions.add(node)
        is_differentiated = bool(needing.intersection(node.input)) and not torch_nodes.stops(node)
        if is_differentiated:
            needing.update(node.output)
        for index in _differentiated_inputs(node) if is_differentiated else []:
            name = node.input[index] if index < len(node.input) else ""
            if not name or name in needing:
                continue
            if expressions.of(name) in seen:
                copy = f"{name}/copy_for/{node.output[0]}/{index}"
                nodes.append(_stopped(name, copy))
                node.input[index] = copy
            seen.add(expressions.of(name))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _stop_twice(graph: Any, wanted: set[str]) -> None:
    """Puts a second node that stops gradients behind one that takes a weight itself.

    ONNX Runtime differentiates each node that takes a wanted weight, if the loss depends on it, and these nodes have no
    gradient. On the second one no weight depends.
    """
    nodes = []
    for node in graph.node:
        if _stops(node) and wanted.intersection(node.input):
            first = f"{node.output[0]}/of_a_weight"
            nodes.append(_stopped(node.input[0], first))
            node.input[0] = first
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _stop_before(graph: Any, places: dict[str, list[int]]) -> None:
    """Puts a node that stops gradients before inputs that are weights and have no gradient, for the same reason.

    Args:
        graph: an exported ``onnx.GraphProto``.
        places: the inputs of a node, by its first output.
    """
    nodes = []
    for node in graph.node:
        for index in places.get(node.output[0], ()):
            stopped = f"{node.output[0]}/without_gradient_{index}"
            nodes.append(_stopped(node.input[index], stopped))
            node.input[index] = stopped
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


class _Expressions:
    """Which values of a graph are computed alike, so that ONNX Runtime's optimizers may make one of them."""

    def __init__(self, graph: Any) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[str, int] = {}
        for tensor in graph.initializer:
            # Large ones are compared by their names: nobody has written the same weights twice.
            is_small = tensor.ByteSize() <= _SMALL + len(tensor.name)
            key = (tensor.data_type, tuple(tensor.dims), _bytes(tensor)) if is_small else tensor.name
            self._of[tensor.name] = self._number(key)

    def of(self, name: str) -> int:
        """Returns a number that two values share if they are computed alike."""
        return self._of[name] if name in self._of else self._number(name)

    def add(self, node: Any) -> None:
        """Takes in the outputs of a node whose inputs are known."""
        inputs = tuple(map(self.of, node.input))
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
        for index, output in enumerate(node.output):
            if node.op_type == "Identity":
                self._of[output] = inputs[0]
            elif node.op_type == "Constant" and node.attribute[0].name == "value":
                tensor = node.attribute[0].t
                self._of[output] = self._number((tensor.data_type, tuple(tensor.dims), _bytes(tensor)))
            else:
                self._of[output] = self._number((node.domain, node.op_type, inputs, attributes, index))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _bytes(tensor: Any) -> bytes:
    return numpy_helper.to_array(tensor).tobytes()


def _differentiated_inputs(node: Any) -> list[int]:
    """Returns the inputs of a node for which its gradient writes a result whether it is needed or not."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    if node.op_type == "Concat":
        return list(range(len(node.input)))
    if node.op_type == "BatchNormInternal":
        # Values, weight and bias.
        return [0, 1, 2]
    if node.domain != _DOMAIN:
        return []
    texts = {a.name: a.s.decode() for a in node.attribute}
    key = f"{_DOMAIN}::ATen::{texts['operator']}::{texts.get('overload_name', '')}"
    written = [out for step in CustomGradientRegistry._GRADIENTS.get(key, ()) for out in step.outputs]
    return sorted(int(out[3:-1]) for out in written if out.startswith("GI("))


def _reached_by_gradients(graph: Any, names: list[str]) -> set[str]:
    """Returns the names of values on which these values depend on a path without `stop_gradient`."""
    producers = {output: node for node in graph.node for output in node.output}
    waiting = list(names)
    reached = set(waiting)
    while waiting:
        name = waiting.pop()
        node = producers.get(name)
        # Further results are indices, masks and statistics.
        is_index = node is not None and node.op_type in ("ATen", "TopK") and name != node.output[0]
        if node is None or is_index or torch_nodes.stops(node):
            continue
        new = set(node.input) - reached
        reached |= new
        waiting.extend(new)
    return reached


def _stopped(name: str, copy: str) -> Any:
    """Makes a node that copies a value and stops its gradient."""
    return helper.make_node("ATen", [name], [copy], name=copy, domain=_DOMAIN, operator=_OPERATOR)


def _stops(node: Any) -> bool:
    return node.domain == _DOMAIN and any(a.name == "operator" and a.s.decode() == _OPERATOR for a in node.attribute)
