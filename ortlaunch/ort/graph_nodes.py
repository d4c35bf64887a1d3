"""The nodes of an ONNX graph, with those of the graphs inside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yields each node of an ``onnx.GraphProto``, and after it those of its branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
