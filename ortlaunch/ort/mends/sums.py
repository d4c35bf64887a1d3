"""Keeps a faulty fusion of onnxruntime 1.19.2 from a Gemm of the gradient of a model's third or later output.

GemmSumFusion, which joins a Gemm and the Sum after it, confuses the inputs of the Gemm with the outputs that they come
from, and stops if the number of such an output is larger than one.
"""

from __future__ import annotations

from typing import Any

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
