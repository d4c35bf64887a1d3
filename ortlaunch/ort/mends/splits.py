"""Replaces Split by Slices where not every part has a gradient.

The gradient of Split that onnxruntime 1.19.2 builds joins the gradients of those parts that have one. If a part is
unused, detached or only compared, the result is too small, and the run stops. Slices of all parts, which ONNX Runtime
joins to a Split, are kept apart for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

_NOT_DIFFERENTIATED = {
    *("Shape", "Size", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "IsNaN"),
    *("IsInf", "NonZero", "ConstantOfShape", "OneHot", "Range", "Sign", "Round", "Floor", "Ceil"),
}
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_END = 2**63 - 1


def slice_where_gradients_end(graph: Any, stops: Callable[[Any], bool], stopped: Callable[[str, str], Any]) -> None:
    """Replaces each Split, and separates all Slices, of which only some parts have a gradient, in place.

    Args:
        graph: an exported ``onnx.GraphProto``.
        stops: whether no gradient flows through a node, for nodes other than ONNX's own.
        stopped: makes a node that copies its first argument to its second, through which no gradient flows.
    """
    if not any(_is_split(node) or node.op_type == "Slice" for node in graph.node):
        return
    reached = _differentiated(graph, stops)
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    sliced = {node.input[0] for node in graph.node if node.op_type == "Slice" and node.output[0] in reached}
    nodes = []
    for node in graph.node:
        if _is_split(node) and 0 < len(reached.intersection(node.output)) < len(node.output):
            nodes += _slices(node, reached, used, stopped)
        elif node.op_type == "Slice" and node.input[0] in sliced and node.output[0] not in reached:
            copy = f"{node.output[0]}/of_a_copy"
            nodes.append(stopped(node.input[0], copy))
            node.input[0] = copy
            nodes.append(node)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_split(node: Any) -> bool:
    return bool(node.op_type == "Split" and len(node.input) == 2)


def _differentiated(graph: Any, stops: Callable[[Any], bool]) -> set[str]:
    """Returns the names of the values on which an output depends on a path with a gradient."""
    producers = {output: node for node in graph.node for output in node.output}
    waiting = [value.name for value in graph.output]
    reached = set(waiting)
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or node.op_type in _NOT_DIFFERENTIATED or _casts_to_integers(node) or stops(node):
            continue
        new = set(node.input) - reached
        reached |= new
        waiting.extend(new)
    return reached


def _casts_to_integers(node: Any) -> bool:
    return node.op_type == "Cast" and next(a.i for a in node.attribute if a.name == "to") not in _FLOATS


def _slices(split: Any, reached: set[str], used: set[str], stopped: Callable[[str, str], Any]) -> list[Any]:
    """Makes a Slice for each used part.

    Parts without a gradient are cut from a copy. ONNX Runtime would join Slices of all parts to a Split again.
    """
    source, sizes = split.input
    axis = next((a.i for a in split.attribute if a.name == "axis"), 0)
    prefix = f"{split.name or split.output[0]}/parts"
    copy, zero, last, along, ends = (f"{prefix}/{what}" for what in ("copy", "zero", "last", "axis", "ends"))
    nodes = [_constant(zero, 0), _constant(last, _END), _constant(along, axis)]
    if (used - reached).intersection(split.output):
        nodes.append(stopped(source, copy))
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
