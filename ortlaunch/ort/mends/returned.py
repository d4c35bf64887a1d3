"""Gives each output of a training graph memory of its own.

ONNX Runtime lets an operator such as Relu or Reshape write its result into the memory of its input, and frees that
memory with the input, after the backward at the latest. It does so even if the result is an output of the model, whose
values are then overwritten while the caller still has them.
"""

from __future__ import annotations

from typing import Any

from onnx import TensorProto, helper

_DOMAIN = "org.pytorch.aten"
_COPY = "detach_copy"
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
    return helper.make_node("ATen", [name], [copy], name=copy, domain=_DOMAIN, operator=_COPY)


def _source(name: str, producers: dict[str, Any], operators: tuple[str, ...]) -> str:
    """Returns the value from which `name` is made by these operators alone."""
    while (node := producers.get(name)) is not None and node.op_type in operators:
        name = node.input[0]
    return name


def _has_own_memory(node: Any | None) -> bool:
    """Whether a node always allocates its results; None stands for an input of the graph."""
    if node is None:
        return False
    if node.domain == _DOMAIN:
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
    backward = [node for node in graph.node if node.name not in forward and node.domain != _DOMAIN]
    read = {name for node in backward if node.op_type not in _READ_NO_VALUES for name in node.input}
    return {_source(name, producers, _SAME_MEMORY) for name in read}
