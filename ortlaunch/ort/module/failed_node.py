"""Says which part of a model an operator of ONNX Runtime's graph comes from, and which one has failed."""

from __future__ import annotations

import re
from typing import Any

from ortlaunch.ort.graphs.nodes import nodes_of, operator_of
from ortlaunch.ort.operators import torch_calls
from ortlaunch.ort.source import location, place_in_stack, statement_at

_FAILED = re.compile(
    r"while running (?P<kind>\S+) node\. Name:'(?P<name>[^']*)' Status Message: (?P<why>.*)", re.DOTALL
)
_WHERE_IN_NATIVE_CODE = re.compile(r"^/onnxruntime_src/\S+ .*?\) (?=[A-Za-z'(])")
_TRACE_OF_NATIVE_CODE = re.compile(r"\s*(Exception raised from|, please report a bug to PyTorch).*", re.DOTALL)
_LONGEST = 300


def failure(manager: Any, message: str) -> str | None:
    """Says which operator of a graph has failed, where the model calls it, and why; None where no message names one.

    Args:
        manager: ORTModule's manager of the graph.
        message: of the error of ONNX Runtime.
    """
    found = _FAILED.search(message)
    if found is None:
        return None
    graph = manager._onnx_models.optimized_model.graph
    node = next((node for node in nodes_of(graph) if node.name == found["name"]), None)
    reason = _TRACE_OF_NATIVE_CODE.sub("", _WHERE_IN_NATIVE_CODE.sub("", found["why"])).strip()[:_LONGEST]
    if node is None:
        return f"the operator {found['kind']} fails ({reason})"
    exported = manager._graph_transition_manager._exported_model_info.exported_model.graph.node
    stacks = {one.name: one.doc_string for one in exported if one.doc_string}
    # The gradient of a node is named after it.
    name, is_gradient, _ = node.name.partition("_Grad/")
    place = place_in_stack(stacks.get(node.name) or stacks.get(name) or "")
    where = f" of `{statement_at(*place)}` at {location(place)}" if place else ""
    operator = _operator(node, {weight.name: weight for weight in graph.initializer})
    return f"{'the gradient of ' if is_gradient else ''}the operator {operator}{where} fails ({reason})"


def _operator(node: Any, weights: dict[str, Any]) -> str:
    from onnx import numpy_helper

    operator = operator_of(node)
    if not operator:
        return f"onnx::{node.op_type}" if not node.domain else f"{node.domain}::{node.op_type}"
    spelled = weights.get(node.input[-1])
    if torch_calls.is_call(operator) and spelled is not None:
        return torch_calls.called(numpy_helper.to_array(spelled).tolist())
    return operator if "::" in operator else f"aten::{operator}"
