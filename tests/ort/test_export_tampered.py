"""A graph from the cache is compared with PyTorch at the start of a run, as one that was exported just now."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from onnx import numpy_helper

from ortlaunch.config.schema import Allow, OrtConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.cache import exports as export_cache
from ortlaunch.ort.verify.start import QuickCheck
from ortlaunch.ort.verify.trap import Finding

FACTOR = 1.5


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * FACTOR


def start() -> tuple[list[str], list[Finding]]:
    """Starts a run's check; returns where the graph came from, and what was found."""
    torch.manual_seed(0)
    model = Scaled()
    data: list[Batch] = [{"x": torch.rand(4, 8), "labels": torch.randint(0, 3, (4,))} for _ in range(3)]
    ort = session.wrap(model, OrtConfig(), threads=1, onnx_dir=Path("onnx"))
    found = QuickCheck(ort, make_task(model, data[0]), contextlib.nullcontext).findings(data)
    return session.export_origins(ort), found


def tamper(factor: float) -> None:
    """Writes another factor into the stored graph, with a digest that is right."""
    (file,) = export_cache.folder().glob("*/export")
    kept = pickle.loads(file.read_bytes()[32:])
    graph = onnx.load_model_from_string(kept.graph)
    changed = 0
    for node in graph.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and numpy_helper.to_array(attribute.t) == FACTOR:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t) * 0 + factor))
                changed += 1
    assert changed == 1
    kept.graph = graph.SerializeToString()
    payload = pickle.dumps(kept)
    file.write_bytes(hashlib.sha256(payload).digest() + payload)


@pytest.mark.parametrize("factor", [FACTOR, 2.0, -FACTOR])
def test_a_stored_graph_that_is_wrong_is_found_at_the_start(factor: float) -> None:
    assert start() == (["stored"], [])
    tamper(factor)
    origins, found = start()
    assert origins == ["hit"]
    assert [finding.kind for finding in found] == ([] if factor == FACTOR else [Allow.wrong_outputs])


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_stored_export_runs_no_code(tmp_path: Path) -> None:
    """It is exported again, as after any damage."""
    assert start() == (["stored"], [])
    (file,) = export_cache.folder().glob("*/export")
    kept = pickle.loads(file.read_bytes()[32:])
    kept.warnings = Attack(tmp_path / "attacked")
    payload = pickle.dumps(kept)
    file.write_bytes(hashlib.sha256(payload).digest() + payload)
    assert start() == (["stored"], [])
    assert not (tmp_path / "attacked").exists()


def test_a_stored_export_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    assert start() == (["stored"], [])
    (file,) = export_cache.folder().glob("*/export")
    file.parent.chmod(0o777)
    ((origin,), found) = start()
    assert origin == f"not stored: {file.parent} can be written by every user" and not found


class Pair(NamedTuple):
    """What a user's model may return."""

    first: int


@pytest.mark.parametrize(
    ("module", "name", "is_known"),
    [
        (__name__, "Pair", True),
        ("torch", "float32", True),
        ("collections", "OrderedDict", True),
        ("transformers.modeling_outputs", "CausalLMOutputWithPast", True),
        (__name__, "Attack", False),
        ("os", "system", False),
        ("torch", "load", False),
        ("builtins", "eval", False),
        ("builtins", "tuple", False),
        ("torch.storage", "_load_from_bytes", False),
        ("antigravity", "fly", False),
    ],
)
def test_what_a_stored_export_may_name(module: str, name: str, is_known: bool) -> None:
    pytest.importorskip("transformers.modeling_outputs")
    assert (export_cache._known(module, name) is not None) is is_known
    assert "antigravity" not in sys.modules
