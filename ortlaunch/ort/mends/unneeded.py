"""Drops gradients that nobody needs from a training graph, and lets operators write those that they compute anyway.

ONNX Runtime leaves the name of a gradient empty if its input needs none. An ATen node then fails ("invalid index -1"),
because PyTorch's operator returns all of its results.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from onnx import helper

_DOMAIN = "org.pytorch.aten"


def drop_unneeded(graph: Any) -> None:
    """Removes ATen nodes without a used result, and names the unused results of the others, in place."""
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input]}
    kept = []
    for node in reversed(graph.node):
        if node.domain == _DOMAIN:
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
