"""The schema's dataclasses compare and print as dataclasses do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ortlaunch.config.schema import BackendConfig, EagerConfig, OrtDebugConfig, TorchProfileConfig


@pytest.mark.parametrize("node", [TorchProfileConfig(ranks=[0, 1]), OrtDebugConfig(onnx_prefix="a'b")])
def test_a_node_prints_and_compares_as_a_dataclass(node: Any) -> None:
    fields = [(field.name, field.type) for field in dataclasses.fields(node)]
    usual = dataclasses.make_dataclass(type(node).__name__, fields)
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    assert repr(node) == repr(usual(**values))
    assert node == dataclasses.replace(node)
    name = fields[-1][0]
    assert node != dataclasses.replace(node, **{name: "another"})
    assert node != usual(**values)
    with pytest.raises(TypeError, match="unhashable"):
        hash(node)


def test_nodes_of_other_classes_differ() -> None:
    assert BackendConfig("eager") != EagerConfig()
