"""Where gradients flow in an exported graph, and corrections of where onnxruntime 1.19.2 loses or confuses them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from ortlaunch.ort.graphs.nodes import ATEN, operator_of

STOPS = "detach_copy"
"""The operator of torch through whose node no gradient flows."""
_SMALL = 1024
"""Bytes up to which two initializers are compared by their values."""
_WITHOUT_GRADIENT = frozenset(
    (
        *("And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN"),
        *("ArgMax", "ArgMin", "NonZero", "Shape", "Size", "ConstantOfShape", "Range"),
        *("RandomNormalLike", "RandomUniformLike"),
    )
)
"""Operators through which ONNX Runtime passes no gradient."""
_NOT_DIFFERENTIATED = {
    *("Shape", "Size", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "IsNaN"),
    *("IsInf", "NonZero", "ConstantOfShape", "OneHot", "Range", "Sign", "Round", "Floor", "Ceil"),
}
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_END = 2**63 - 1


def slice_where_gradients_end(graph: Any) -> None:
    """Replaces each Split, and separates all Slices, of which only some parts have a gradient, in place.

    Args:
        graph: an exported ``onnx.GraphProto``.
    """
    if not any(_is_split(node) or node.op_type == "Slice" for node in graph.node):
        return
    reached = _differentiated(graph)
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    sliced = {node.input[0] for node in graph.node if node.op_type == "Slice" and node.output[0] in reached}
    nodes = []
    for node in graph.node:
        if _is_split(node) and 0 < len(reached.intersection(node.output)) < len(node.output):
            nodes += _slices(node, reached, used)
        elif node.op_type == "Slice" and node.input[0] in sliced and node.output[0] not in reached:
            copy = f"{node.output[0]}/of_a_copy"
            nodes.append(_stopped(node.input[0], copy))
            node.input[0] = copy
            nodes.append(node)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_split(node: Any) -> bool:
    return bool(node.op_type == "Split" and len(node.input) == 2)


def _differentiated(graph: Any) -> set[str]:
    """Returns the names of the values on which an output depends on a path with a gradient."""
    producers = {output: node for node in graph.node for output in node.output}
    waiting = [value.name for value in graph.output]
    reached = set(waiting)
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or node.op_type in _NOT_DIFFERENTIATED or _casts_to_integers(node) or _stops(node):
            continue
        new = set(node.input) - reached
        reached |= new
        waiting.extend(new)
    return reached


def _casts_to_integers(node: Any) -> bool:
    return node.op_type == "Cast" and next(a.i for a in node.attribute if a.name == "to") not in _FLOATS


def _slices(split: Any, reached: set[str], used: set[str]) -> list[Any]:
    """Makes a Slice for each used part.

    Parts without a gradient are cut from a copy. ONNX Runtime would join Slices of all parts to a Split again.
    """
    source, sizes = split.input
    axis = next((a.i for a in split.attribute if a.name == "axis"), 0)
    prefix = f"{split.name or split.output[0]}/parts"
    copy, zero, last, along, ends = (f"{prefix}/{what}" for what in ("copy", "zero", "last", "axis", "ends"))
    nodes = [_constant(zero, 0), _constant(last, _END), _constant(along, axis)]
    if (used - reached).intersection(split.output):
        nodes.append(_stopped(source, copy))
    # The sizes may be computed in the run.
    nodes.append(helper.make_node("CumSum", [sizes, zero], [ends], name=ends))
    places = [zero, *(f"{prefix}/end_{index}" for index in range(len(split.output) - 1)), last]
    for index, place in enumerate(places[1:-1]):
        nodes.append(_constant(f"{place}/index", index))
        nodes.append(helper.make_node("Gather", [ends, f"{place}/index"], [place], name=place, axis=0))
    for name, start, end in zip(split.output, places[:-1], places[1:], strict=True):
        if name in used:
            whole = source if name in reached else copy
            nodes.append(helper.make_node("Slice", [whole, start, end, along], [name], name=f"{name}/slice"))
    return nodes


def _constant(name: str, value: int) -> Any:
    tensor = numpy_helper.from_array(np.array([value], dtype=np.int64))
    return helper.make_node("Constant", [], [name], name=name, value=tensor)


def stops(node: Any) -> bool:
    """Whether ONNX Runtime passes no gradient through the node."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    if node.op_type == "Cast":
        return all(x.i not in _FLOATS for x in node.attribute if x.name == "to")
    if (node.op_type, node.domain) != ATEN:
        return node.op_type in _WITHOUT_GRADIENT
    texts = {x.name: x.s.decode() for x in node.attribute}
    key = f"{node.domain}::{node.op_type}::{texts['operator']}::{texts.get('overload_name', '')}"
    return 0 in CustomGradientRegistry._STOP_GRADIENT_EDGES.get(key, ())


def separate_unwanted(graph: Any, wanted: set[str]) -> None:
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
        is_differentiated = bool(needing.intersection(node.input)) and not stops(node)
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


def stop_twice(graph: Any, wanted: set[str]) -> None:
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


def stop_before(graph: Any, places: dict[str, list[int]]) -> None:
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
    if node.domain != ATEN[1]:
        return []
    texts = {a.name: a.s.decode() for a in node.attribute}
    key = f"{ATEN[1]}::ATen::{texts['operator']}::{texts.get('overload_name', '')}"
    written = [out for step in CustomGradientRegistry._GRADIENTS.get(key, ()) for out in step.outputs]
    return sorted(int(out[3:-1]) for out in written if out.startswith("GI("))


def reached_by_gradients(graph: Any, names: list[str]) -> set[str]:
    """Returns the names of values on which these values depend on a path without `stop_gradient`."""
    producers = {output: node for node in graph.node for output in node.output}
    waiting = list(names)
    reached = set(waiting)
    while waiting:
        name = waiting.pop()
        node = producers.get(name)
        # Further results are indices, masks and statistics.
        is_index = node is not None and node.op_type in ("ATen", "TopK") and name != node.output[0]
        if node is None or is_index or stops(node):
            continue
        new = set(node.input) - reached
        reached |= new
        waiting.extend(new)
    return reached


def _stopped(name: str, copy: str) -> Any:
    """Makes a node that copies a value and stops its gradient."""
    return helper.make_node("ATen", [name], [copy], name=copy, domain=ATEN[1], operator=STOPS)


def _stops(node: Any) -> bool:
    return operator_of(node) == STOPS
