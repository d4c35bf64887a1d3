"""Simplifies sums in ORTModule's finished graph, forward and backward in one, that cost passes over large tensors.

A token embedding that is also the output layer has two gradients, both as large as the vocabulary: one has numbers in
the rows of the tokens that were seen, and these are added into the other. And an output that the loss was computed of,
GPT-2's logits, gets a gradient of its own from outside, which is nothing where only the loss was used: adding nothing
to hundreds of megabytes takes as long as adding something.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ortlaunch.ort.aten_nodes import ATEN

ADD_ROWS = "ortlaunch::add_embedding_gradient"
ADD_OUTER = "ortlaunch::add_outer_gradient"
_OURS = "ortlaunch::"
_ALIASES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def install() -> None:
    """Has ORTModule simplify the graphs that it builds from now on for the CPU; harmless to repeat."""
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    registered = GraphOptimizerRegistry._OPTIMIZER_FUNCS.get("all", [])
    if not any(function is simplify for function, _, _ in registered):
        GraphOptimizerRegistry.register("all", "cpu", 0, simplify)


def simplify(graph: Any) -> None:
    """Rewrites the sums of two in `graph` that it can, in place."""
    producers = {output: node for node in graph.node for output in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    constants = _constants(graph)
    gone = set()
    for node in graph.node:
        if node.op_type != "Sum" or len(node.input) != 2:
            continue
        for first, second in (tuple(node.input), tuple(node.input)[::-1]):
            # It is written into, so nobody else may look at it.
            if not _is_fresh(first, producers, uses):
                continue
            other = producers.get(second)
            if other is None:
                continue
            if other.op_type == "YieldOp":
                _call(node, ADD_OUTER, [first, second])
                break
            if _operator(other) == "embedding_backward" and uses[second] == 1 and _is_dense(other, constants):
                grad, indices, _, padding, _, _ = other.input
                _call(node, ADD_ROWS, [first, grad, indices, padding])
                gone.add(second)
                break
    kept = [node for node in graph.node if not gone.intersection(node.output)]
    if gone:
        del graph.node[:]
        graph.node.extend(kept)


def _is_fresh(name: str, producers: dict[str, Any], uses: Counter[str]) -> bool:
    """Whether a tensor is one of our operators' results, used only here."""
    while uses[name] == 1 and (node := producers.get(name)) is not None:
        if _operator(node).startswith(_OURS):
            return name == node.output[0]
        if node.op_type not in _ALIASES:
            return False
        name = node.input[0]
    return False


def _is_dense(node: Any, constants: dict[str, int]) -> bool:
    _, _, _, _, scale_by_frequency, sparse = node.input
    return constants.get(scale_by_frequency) == 0 and constants.get(sparse) == 0


def _constants(graph: Any) -> dict[str, int]:
    """The values of constants that are one integer or boolean."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    single = {name: numpy_helper.to_array(x) for name, x in tensors.items() if len(x.dims) == 0}
    return {name: int(value) for name, value in single.items() if value.dtype.kind in "bi"}


def _operator(node: Any) -> str:
    """What an ATen node calls; nothing for any other node."""
    is_aten = (node.op_type, node.domain) == ATEN
    return next((x.s.decode() for x in node.attribute if x.name == "operator"), "") if is_aten else ""


def _call(node: Any, operator: str, inputs: list[str]) -> None:
    """Makes `node` an ATen node that calls `operator`."""
    from onnx import helper

    op_type, domain = ATEN
    node.CopyFrom(helper.make_node(op_type, inputs, list(node.output), node.name, domain=domain, operator=operator))
