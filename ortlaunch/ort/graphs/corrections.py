"""Corrections of graphs that onnxruntime 1.19.2 would compute wrongly, or not at all.

- `pad_explicitly`: torch's exporter writes ``padding="same"`` as ONNX's ``auto_pad``. ConvGrad ignores that attribute
  and reads beyond its input, and Conv refuses it with a dilation. Both compute correctly with explicit ``pads``.
- `copy_outputs`: an operator such as Relu or Reshape may write its result into the memory of its input, which is freed
  with the input, after the backward at the latest, even if the result is an output of the model. Its values are then
  overwritten while the caller still has them, so each output of a training graph gets memory of its own.
- `avoid_fusion`: GemmSumFusion, which joins a Gemm and the Sum after it, confuses the inputs of the Gemm with the
  outputs that they come from, and stops if the number of such an output is larger than one.
- `drop_unneeded`: the name of a gradient stays empty if its input needs none. An ATen node then fails ("invalid index
  -1"), because PyTorch's operator returns all of its results.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from onnx import TensorProto, helper

from ortlaunch.ort.graphs.gradients import STOPS
from ortlaunch.ort.graphs.nodes import ATEN

_OWN_MEMORY = frozenset({"MatMul", "FusedMatMul", "Gemm", "Conv"})
"""Operators that make large outputs and never write into the memory of an input."""
_OUR_OPERATORS = "ortlaunch::"
_SAME_MEMORY = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_READ_NO_VALUES = ("Shape", "Size", *_SAME_MEMORY)


def copy_outputs(graph: Any) -> None:
    """Inserts a copy before each output whose memory could be another tensor's, in place."""
    end = next((node for node in graph.node if node.op_type == "YieldOp"), None)
    if end is None:
        return
    producers = {output: node for node in graph.node for output in node.output if output}
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input]}
    overwritten = _inputs_of_backward(graph, end, producers)
    copies, seen = [], set()
    for index, name in enumerate(end.input):
        source = _source(name, producers, ("Identity",))
        buffer = _source(source, producers, _SAME_MEMORY)
        if buffer in seen or buffer in overwritten or not _has_own_memory(producers.get(source)):
            copy = f"{name}/copy/{index}"
            copies.append(_copied(name, copy, types.get(name) or types[source]))
            graph.value_info.append(helper.make_tensor_value_info(copy, types.get(name) or types[source], None))
            end.input[index] = copy
        else:
            end.input[index] = source
        seen.add(buffer)
    nodes = []
    for node in graph.node:
        nodes += [*copies, node] if node.op_type == "YieldOp" else [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _copied(name: str, copy: str, kind: int) -> Any:
    if kind == TensorProto.BOOL:
        # An ATen node cannot return booleans.
        return helper.make_node("Or", [name, name], [copy], name=copy)
    return helper.make_node("ATen", [name], [copy], name=copy, domain=ATEN[1], operator=STOPS)


def _source(name: str, producers: dict[str, Any], operators: tuple[str, ...]) -> str:
    """Returns the value from which `name` is made by these operators alone."""
    while (node := producers.get(name)) is not None and node.op_type in operators:
        name = node.input[0]
    return name


def _has_own_memory(node: Any | None) -> bool:
    """Whether a node always allocates its results; None stands for an input of the graph."""
    if node is None:
        return False
    if node.domain == ATEN[1]:
        return any(a.name == "operator" and a.s.decode().startswith(_OUR_OPERATORS) for a in node.attribute)
    return node.op_type in _OWN_MEMORY


def _inputs_of_backward(graph: Any, end: Any, producers: dict[str, Any]) -> set[str]:
    """Returns what ONNX Runtime's own operators read in the backward, the last of which may write into it."""
    forward = {end.name}
    waiting = list(end.input)
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and node.name not in forward:
            forward.add(node.name)
            waiting.extend(node.input)
    backward = [node for node in graph.node if node.name not in forward and node.domain != ATEN[1]]
    read = {name for node in backward if node.op_type not in _READ_NO_VALUES for name in node.input}
    return {_source(name, producers, _SAME_MEMORY) for name in read}


_LARGEST = 1
"""Number of the last output of a node that the fusion accepts."""


def avoid_fusion(graph: Any) -> None:
    """Turns the sums of two summands after such a Gemm into Add, which is not fused, in place."""
    late = {name for node in graph.node for name in node.output[_LARGEST + 1 :]}
    originals = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity"}

    def is_late(name: str) -> bool:
        while name in originals:
            name = originals[name]
        return name in late

    products = {node.output[0] for node in graph.node if node.op_type == "Gemm" and any(map(is_late, node.input))}
    for node in graph.node:
        if node.op_type == "Sum" and len(node.input) == 2 and products.intersection(node.input):
            node.op_type = "Add"


def drop_unneeded(graph: Any) -> None:
    """Removes ATen nodes without a used result, and names the unused results of the others, in place."""
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input]}
    kept = []
    for node in reversed(graph.node):
        if node.domain == ATEN[1]:
            if not any(uses[name] for name in node.output if name):
                uses.subtract(node.input)
                continue
            for index, name in enumerate(node.output):
                if not name:
                    # It has the type of the gradient that comes in.
                    unneeded = node.output[index] = f"{node.name}/unneeded/{index}"
                    graph.value_info.append(helper.make_tensor_value_info(unneeded, types[node.input[0]], None))
        kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))


_SAME = (b"SAME_UPPER", b"SAME_LOWER")


def pad_explicitly(graph: Any) -> None:
    """Replaces ``auto_pad`` of every Conv by the equivalent ``pads``, in place.

    Args:
        graph: an exported ``onnx.GraphProto``. Convolutions with ``auto_pad`` have stride 1, as torch requires.
    """
    for node in graph.node:
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
            continue
        values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        mode = values.pop("auto_pad", b"NOTSET")
        if mode == b"NOTSET":
            continue
        if mode in _SAME:
            kernel = values["kernel_shape"]
            dilations = values.get("dilations") or [1] * len(kernel)
            totals = [dilation * (size - 1) for size, dilation in zip(kernel, dilations, strict=True)]
            less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
            values["pads"] = [*less, *more] if mode == b"SAME_UPPER" else [*more, *less]
        del node.attribute[:]
        node.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())
