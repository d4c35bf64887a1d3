"""Simplifies sums over large tensors in ORTModule's finished graph, which contains forward and backward.

There are two kinds. A token embedding that is also the output layer has two gradients of the vocabulary's size. One of
them is zero except in the rows of the used tokens, and only these rows are added to the other. And an output of the
model such as GPT-2's logits gets a gradient from outside, which is zero if only the loss was used. Adding hundreds of
megabytes of zeros takes as long as adding numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ortlaunch.ort.graphs.nodes import ATEN, operator_of

ADD_ROWS = "ortlaunch::add_embedding_gradient"
ADD_OUTER = "ortlaunch::add_outer_gradient"
_OURS = "ortlaunch::"
_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def simplify(graph: Any) -> None:
    """Rewrites the sums of two summands in `graph` where possible, in place."""
    view = _View(graph)
    for node in [node for node in graph.node if node.op_type == "Sum" and len(node.input) == 2]:
        for first, second in (tuple(node.input), tuple(node.input)[::-1]):
            if _add_rows(view, node, first, second) or _add_outer(view, node, first, second):
                break
    view.write()


class _View:
    """A graph and its pending changes."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.producers = {output: node for node in graph.node for output in node.output}
        self.uses = Counter(name for node in graph.node for name in node.input)
        self.uses.update(value.name for value in graph.output)
        self.constants = _constants(graph)
        self.types = {value.name: value for value in graph.value_info}
        self.gone: set[str] = set()
        self.following: dict[str, Any] = {}
        """New nodes, by the output after whose node each is inserted."""

    def write(self) -> None:
        """Applies the changes to the graph."""
        nodes = []
        for node in self.graph.node:
            if not self.gone.intersection(node.output):
                nodes.append(node)
            nodes += [self.following[name] for name in node.output if name in self.following]
        if self.gone or self.following:
            del self.graph.node[:]
            self.graph.node.extend(nodes)


def _add_rows(view: _View, node: Any, first: str, second: str) -> bool:
    """Adds an embedding's gradient into the other summand if possible; returns whether it did."""
    other = view.producers.get(second)
    if other is None or operator_of(other) != "embedding_backward" or view.uses[second] != 1:
        return False
    if not _is_ours_alone(view, first) or not _is_dense(other, view.constants):
        return False
    grad, indices, _, padding, _, _ = other.input
    _call(node, ADD_ROWS, [first, grad, indices, padding])
    view.gone.add(second)
    return True


def _add_outer(view: _View, node: Any, first: str, second: str) -> bool:
    """Adds the gradient of an output into the other summand if possible; returns whether it did."""
    outer = second
    while (source := view.producers.get(outer)) is not None and source.op_type == "Identity":
        outer = source.input[0]
    if source is None or source.op_type != "YieldOp":
        return False
    # This comes before the other summand is reshaped, because ONNX Runtime does not track the owner of reshaped memory.
    root, last = first, None
    while view.uses[root] == 1 and (shaped := view.producers.get(root)) is not None and shaped.op_type in _RESHAPES:
        last = last or shaped
        above, root = shaped, shaped.input[0]
    if not _is_ours_alone(view, root):
        return False
    if last is None:
        _call(node, ADD_OUTER, [root, outer])
        return True
    if root not in view.types:
        return False
    total = f"{root}/with_outer"
    kind = view.graph.value_info.add()
    kind.CopyFrom(view.types[root])
    kind.name = total
    above.input[0] = total
    view.following[root] = _node(ADD_OUTER, [root, outer], [total], total)
    last.output[0] = node.output[0]
    node.output[0] = f"{node.output[0]}/gone"
    view.gone.add(node.output[0])
    return True


def _is_ours_alone(view: _View, name: str) -> bool:
    """Whether the tensor is a new result of one of our operators and used once, so that it may be overwritten."""
    node = view.producers.get(name)
    return view.uses[name] == 1 and node is not None and operator_of(node).startswith(_OURS) and name == node.output[0]


def _is_dense(node: Any, constants: dict[str, int]) -> bool:
    _, _, _, _, scale_by_frequency, sparse = node.input
    return constants.get(scale_by_frequency) == 0 and constants.get(sparse) == 0


def _constants(graph: Any) -> dict[str, int]:
    """Returns the values of constants that are a single integer or boolean."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    single = {name: numpy_helper.to_array(x) for name, x in tensors.items() if len(x.dims) == 0}
    return {name: int(value) for name, value in single.items() if value.dtype.kind in "bi"}


def _call(node: Any, operator: str, inputs: list[str]) -> None:
    """Changes `node` to an ATen node that calls `operator`."""
    node.CopyFrom(_node(operator, inputs, list(node.output), node.name))


def _node(operator: str, inputs: list[str], outputs: list[str], name: str) -> Any:
    from onnx import helper

    op_type, domain = ATEN
    return helper.make_node(op_type, inputs, outputs, name, domain=domain, operator=operator)
