"""The shapes that are inferred for an export are kept beside it, and used for that very graph alone."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.config.schema import OrtConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.cache import exports as export_cache
from ortlaunch.ort.cache import shaped
from ortlaunch.ort.kernels import shapes
from ortlaunch.ort.verify.start import QuickCheck


class Scaled(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, width)
        self.last = torch.nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(x).reshape(x.shape[0], -1).relu())


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs for which onnxruntime infers shapes."""
    session.import_ortmodule()
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    # It replaces the same function once, and for good.
    shapes.register()
    graphs: list[Any] = []
    original = SymbolicShapeInference.infer_shapes

    def infer(model: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(model)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(SymbolicShapeInference, "infer_shapes", staticmethod(infer))
    return graphs


def start(width: int = 4) -> tuple[list[str], bytes]:
    """Starts a run's check, which finds nothing; returns where the graph came from, and it with its shapes."""
    torch.manual_seed(0)
    model = Scaled(width)
    data: list[Batch] = [{"x": torch.rand(4, 8), "labels": torch.randint(0, 3, (4,))} for _ in range(3)]
    ort = session.wrap(model, OrtConfig(), threads=1, onnx_dir=None)
    assert QuickCheck(ort, make_task(model, data[0]), contextlib.nullcontext).findings(data) == []
    manager: Any = session.training_manager(ort)
    info = manager._graph_transition_manager._post_export_processed_model_info
    graph: bytes = info._post_export_processed_model.SerializeToString(deterministic=True)
    return session.export_origins(ort), graph


def kept() -> list[Path]:
    return sorted(export_cache.folder().glob(f"*/{shaped.FILE}"))


def test_the_second_start_infers_no_shapes_and_has_the_same_graph(inferred: list[Any]) -> None:
    first = start()
    assert first[0] == ["stored"] and len(inferred) == 1
    second = start()
    assert second[0] == ["hit"] and len(inferred) == 1
    assert second[1] == first[1]


def test_another_graph_is_inferred_again(inferred: list[Any]) -> None:
    """The shapes of one model in the place of another's, as complete as its own."""
    narrow, wide = start(4), start(6)
    one, other = kept()
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    assert [start(4)[1], start(6)[1]] == [narrow[1], wide[1]]
    assert len(inferred) == 4
    # The right ones are kept again.
    assert (one.read_bytes(), other.read_bytes()) == contents
    assert start(4)[1] == narrow[1] and len(inferred) == 4


@pytest.mark.parametrize("place", [0, 40, -1], ids=["digest", "digest of the graph", "graph"])
def test_damaged_shapes_are_inferred_again(place: int, inferred: list[Any]) -> None:
    first = start()
    (file,) = kept()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert start() == (["hit"], first[1])
    assert len(inferred) == 2


def test_shapes_that_others_may_write_are_not_used(inferred: list[Any]) -> None:
    first = start()
    (file,) = kept()
    file.chmod(0o666)
    ((origin,), graph) = start()
    assert origin == f"not stored: {file} can be written by every user"
    assert graph == first[1] and len(inferred) == 2


def test_where_it_exports_anew_shapes_are_inferred_anew(inferred: list[Any]) -> None:
    start()
    with export_cache.exporting_anew():
        start()
    assert len(inferred) == 2


def test_an_inference_leaves_random_numbers_as_they_are() -> None:
    def infer(model: Any) -> Any:
        random.random()
        return model

    before = random.getstate()
    shaped.keeping(infer)(None)
    assert random.getstate() == before
