"""A graph from the cache is compared with PyTorch at the start of a run, as one that was exported just now."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from pathlib import Path

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
