"""The message about an operator of the graph that fails while it is computed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import helper

from ortlaunch.ort.module.failed_node import failure
from ortlaunch.ort.refusal import cause

NATIVE = (
    "Error in forward pass execution: Non-zero status code returned while running {kind} node. Name:'{name}' Status "
    "Message: {why}"
)
INTERNAL = (
    'dlpack->dtype.bits == 64 INTERNAL ASSERT FAILED at "/x/executor.cc":66, please report a bug to PyTorch. \n'
    "Exception raised from ToIValueArgument at /x/executor.cc:66 (most recent call first):\nframe #0: ..."
)
ORT = "/onnxruntime_src/core/tensor/reshape.h:45 onnxruntime::Reshape::Reshape(const T&, bool) (size != 0) was false."


def manager_of(*nodes: Any) -> Any:
    """A manager of a graph with these nodes, which have been exported from this file."""
    graph = helper.make_graph(list(nodes), "graph", [], [])
    stack = f"{__file__}(1): forward\n"
    exported = helper.make_graph(
        [helper.make_node("Gelu", ["x"], ["y"], name="/m/layer/Gelu", doc_string=stack)], "e", [], []
    )
    info = SimpleNamespace(exported_model=SimpleNamespace(graph=exported))
    return SimpleNamespace(
        _onnx_models=SimpleNamespace(optimized_model=SimpleNamespace(graph=graph)),
        _graph_transition_manager=SimpleNamespace(_exported_model_info=info),
    )


@pytest.mark.parametrize(
    ("name", "kind", "why", "said"),
    [
        (
            "/m/layer/Gelu",
            "Gelu",
            INTERNAL,
            r"^the operator onnx::Gelu of `.*` at .*test_failed_node.py:1 fails \(dlpack",
        ),
        ("/m/layer/Gelu_Grad/Mul_0", "Mul", ORT, r"^the gradient of the operator onnx::Mul of .* fails \(.*size != 0"),
        ("elsewhere", "FusedMatMul", ORT, r"^the operator FusedMatMul fails \("),
    ],
)
def test_it_names_operator_statement_and_reason(name: str, kind: str, why: str, said: str) -> None:
    manager = manager_of(
        helper.make_node("Gelu", ["x"], ["y"], name="/m/layer/Gelu"),
        helper.make_node("Mul", ["x"], ["y"], name="/m/layer/Gelu_Grad/Mul_0"),
    )
    text = failure(manager, NATIVE.format(kind=kind, name=name, why=why))
    assert text is not None
    assert re.search(said, text), text
    assert "raised from" not in text
    assert "onnxruntime_src" not in text


def test_other_errors_name_no_operator() -> None:
    assert failure(manager_of(), "the model is wrong") is None
    assert "raised from" not in cause(RuntimeError(INTERNAL))
