"""The nodes of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ATEN = ("ATen", "org.pytorch.aten")
"""Kind and domain of a node that calls an operator of torch."""


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yields each node of an ``onnx.GraphProto``, and after it those of its branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


def operator_of(node: Any) -> str:
    """Returns the operator that an ATen node calls; empty for any other node."""
    is_aten = (node.op_type, node.domain) == ATEN
    return next((x.s.decode() for x in node.attribute if x.name == "operator"), "") if is_aten else ""
