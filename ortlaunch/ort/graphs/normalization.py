"""Keeps onnxruntime's fusions of LayerNorm and RMSNorm from chains of operators that are something else.

The fusions of onnxruntime 1.19.2 follow Pow, ReduceMean, Add, Sqrt, Div and Mul. They check neither that the exponent
is 2 nor the size of the weight, and where the epsilon is not a constant of fp32 that is added second, they take 1e-5
instead. With a sliced weight the run stops; with another exponent or epsilon the node computes something else. Such a
chain gets an Abs after its root, which changes no number and which the fusions do not know.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

_TWO = "normalization/exponent"


def avoid_fusion(model: Any) -> None:
    """Changes each chain that the fusions would take for a normalization, in place.

    Args:
        model: an exported ``onnx.ModelProto``.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    means = {node.output[0]: _mean_under(node, producers) for node in graph.node if node.op_type == "Sqrt"}
    if all(mean is None for mean in means.values()):
        return
    view = _View(graph, producers, onnx.shape_inference.infer_shapes(model).graph.value_info)
    two = helper.make_node(
        "Constant", [], [_TWO], name=_TWO, value=helper.make_tensor(_TWO, TensorProto.FLOAT, [], [2.0])
    )
    nodes = [two]
    for node in graph.node:
        nodes.append(node)
        root = node.output[0] if node.output else ""
        mean = means.get(root)
        if mean is None:
            continue
        if view.is_normalization(node, mean):
            # The fusion stops at an exponent that is cast and shared with another chain.
            producers[mean.input[0]].input[1] = _TWO
        else:
            node.output[0] = f"{root}/signed"
            nodes.append(helper.make_node("Abs", [node.output[0]], [root], name=f"{root}/abs"))
    del graph.node[:]
    graph.node.extend(nodes)


def _mean_under(root: Any, producers: dict[str, Any]) -> Any | None:
    """Returns the ReduceMean of powers to which something is added under the root; None if there is none."""
    total = producers.get(root.input[0])
    for name in total.input if total is not None and total.op_type == "Add" else ():
        mean = producers.get(name)
        if mean is not None and mean.op_type == "ReduceMean":
            power = producers.get(mean.input[0])
            return mean if power is not None and power.op_type == "Pow" else None
    return None


class _View:
    """A graph, and what is known of its values."""

    def __init__(self, graph: Any, producers: dict[str, Any], inferred: Any) -> None:
        self.producers = producers
        self.users: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self.users[name].append(node)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        types = {x.name: x.type.tensor_type for x in (*graph.input, *inferred)}
        self.shapes = {
            name: [size.dim_value for size in kind.shape.dim] for name, kind in types.items() if kind.HasField("shape")
        }
        self.shapes |= {name: list(tensor.dims) for name, tensor in self.constants.items()}

    def is_normalization(self, root: Any, mean: Any) -> bool:
        """Whether what the fusions take for granted is known to hold."""
        total, power = self.producers[root.input[0]], self.producers[mean.input[0]]
        x, epsilon = power.input[0], total.input[1]
        if self._number(power.input[1]) != 2.0:
            return False
        if epsilon not in self.constants or self.constants[epsilon].data_type != TensorProto.FLOAT:
            return False
        axes = next((list(one.ints) for one in mean.attribute if one.name == "axes"), [])
        shape = self.shapes.get(x, [])
        sizes = shape[len(shape) - len(axes) :]
        # A size of 0 is unknown.
        is_known = 0 < len(axes) < len(shape) and all(sizes)
        return is_known and all(self.shapes.get(name) == sizes for name in self._weights(root, x))

    def _number(self, name: str) -> float | None:
        """Returns a constant of one element, which may be cast; None for anything else."""
        while name in self.producers and self.producers[name].op_type == "Cast":
            name = self.producers[name].input[0]
        values = numpy_helper.to_array(self.constants[name]) if name in self.constants else None
        return float(values.reshape(-1)[0]) if values is not None and values.size == 1 else None

    def _weights(self, root: Any, x: str) -> list[str]:
        """Returns by what x over the root is multiplied."""
        found, waiting = [], [root.output[0]]
        while waiting:
            name = waiting.pop()
            for user in self.users[name]:
                others = [other for other in user.input if other not in (name, x)]
                if user.op_type == "Mul" and others:
                    found += others
                elif user.op_type in ("Mul", "Div", "Cast", "Reciprocal"):
                    waiting += user.output
        return found
