"""The second start does not export again, and whatever could change the graph makes it do so."""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper

from ortlaunch.config.schema import ModelConfig, OrtConfig
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.module import cache
from ortlaunch.ort.module.python_values import described
from ortlaunch.ort.operators import shapes
from ortlaunch.ort.verify.fitting import Fitting
from ortlaunch.ort.verify.reference import Reference
from tests.ort.starts import Start
from tests.support.nightly import first_in_ci

NET = """
import torch
from helper import scale

class Net(torch.nn.Module):
    def __init__(self, width=6, factor=1.0):
        super().__init__()
        self.linear = torch.nn.Linear(4, width)
        self.dropout = torch.nn.Dropout(0.5)
        self.factor = factor

    def forward(self, x, flip=False):
        return scale(self.linear(self.dropout(x)) * self.factor)
"""
HELPER = "def scale(x):\n    return x * 2\n"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A user's model in two files of their own."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


def start(folder: Path, **arguments: Any) -> dict[str, Any]:
    return Start(folder, **arguments).end()


def test_the_second_start_is_a_hit_and_equal_to_the_first(net: Path) -> None:
    first, second = start(net), start(net)
    assert first["origins"] == ["stored"]
    assert second["origins"] == ["hit"]
    assert second["losses"] == first["losses"]
    assert second["grad"] == first["grad"]
    # Dropout is not frozen. (With ONNX Runtime's own kernel the first two calls draw the same, cached or not.)
    assert len(set(second["losses"])) > 1


def test_an_export_leaves_nothing_behind_that_makes_the_next_of_the_process_a_miss(net: Path) -> None:
    assert start(net, models=2)["origins"] == ["hit"]


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"width": 7}},
        {"model": {"factor": 3.0}},
        {"train": False},
        {"batch": 5},
        {"freeze": True},
    ],
    ids=str,
)
def test_another_model_mode_or_shape_is_a_miss(net: Path, other: dict[str, object]) -> None:
    start(net)
    assert start(net, **other)["origins"] == ["stored"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("net.py", "self.factor)", "self.factor + 1)"), ("helper.py", "x * 2", "x * 5")],
)
def test_changed_code_of_the_user_is_a_miss_also_in_a_file_that_the_model_only_imports(
    net: Path, file: str, old: str, new: str
) -> None:
    first = start(net, train=False)
    text = (net / file).read_text()
    assert old in text
    (net / file).write_text(text.replace(old, new))
    changed = start(net, train=False)
    assert changed["origins"] == ["stored"]
    assert changed["losses"] != first["losses"]


def test_other_weights_and_data_are_a_hit_with_results_of_their_own(net: Path) -> None:
    start(net, train=False)
    cached = start(net, train=False, seed=1)
    assert cached["origins"] == ["hit"]
    assert cached["losses"] == start(net, train=False, seed=1, cfg={"export_cache": False})["losses"]


def test_switched_off_it_keeps_and_takes_nothing(net: Path) -> None:
    assert start(net, cfg={"export_cache": False})["origins"] == []
    assert not (net / "exports").exists()


def test_processes_that_start_together_all_succeed_and_leave_one_export(net: Path) -> None:
    together = [begun.end() for begun in [Start(net) for _ in range(2)]]
    assert {origin for result in together for origin in result["origins"]} <= {"stored", "hit"}
    assert sorted(path.suffix for path in (net / "exports").iterdir()) == [".json", ".onnx", ".shapes"]
    assert start(net)["origins"] == ["hit"]


@pytest.mark.parametrize(("suffix", "origin"), [("onnx", "stored"), ("shapes", "hit")])
@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_file_is_made_anew(net: Path, suffix: str, origin: str, damage: bytes) -> None:
    first = start(net)
    (file,) = (net / "exports").glob(f"*.{suffix}")
    content = file.read_bytes()
    file.write_bytes(damage)
    again = start(net)
    assert again["origins"] == [origin]
    assert again["grad"] == first["grad"]
    assert file.read_bytes() == content


def test_a_cache_that_cannot_be_written_to_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that lies in an image."""
    wrapped(torch.nn.Linear(4, 3))(torch.rand(2, 4)).sum().backward()

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cache.os, "utime", refuse)
    ort = wrapped(torch.nn.Linear(4, 3))
    with cache.reading():
        ort(torch.rand(2, 4)).sum().backward()
    assert session.export_origins(ort) == ["hit"]


class Frozen(torch.nn.Module):
    """Its branch is decided by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class Statistics(torch.nn.Module):
    """Its buffers change as it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def wrapped(model: torch.nn.Module, **cfg: bool) -> torch.nn.Module:
    return session.wrap(model, OrtConfig(**cfg), threads=1, onnx_dir=Path())


def test_a_trace_that_has_read_a_value_is_not_kept() -> None:
    ort = wrapped(Frozen())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ort(torch.rand(2, 4)).sum().backward()
    (origin,) = session.export_origins(ort)
    assert origin.startswith(f"not stored: the trace depends on a tensor's value at {__file__}:")
    assert not cache.folder().exists()


def test_batch_statistics_are_the_same_with_and_without_the_cache() -> None:
    """Whatever an export does to them, a second start does too."""
    results = []
    for cfg in ({}, {}, {"export_cache": False}):
        torch.manual_seed(0)
        ort = wrapped(Statistics(), **cfg)
        for _ in range(2):
            with cache.reading():
                ort(torch.rand(5, 4)).sum().backward()
        results.append({name: buffer.tolist() for name, buffer in ort.named_buffers()})
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", first_in_ci(["gpt2_nano", "vit", "bert", "llama"], 2))
def test_families_are_a_hit_with_the_same_loss_and_gradients(name: str) -> None:
    small = {
        "bert": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32},
        "llama": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32},
    }
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build_model(ModelConfig(name=name, params=small.get(name, {})))
        ort = wrapped(model)
        batch = {"input_ids": torch.randint(0, 200, (2, 8))}
        batch["labels"] = batch["input_ids"]
        if name == "vit":
            batch = {"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.tensor([1, 2])}
        torch.manual_seed(1)
        with cache.reading():
            output = ort(**batch)
        output.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((session.export_origins(ort), type(output), list(output), output.loss.item(), gradients))
    (first, *expected), (second, *actual) = results
    assert (first, second) == (["stored"], ["hit"])
    assert actual[:2] == expected[:2]
    assert actual[2] == expected[2]
    for one, other in zip(actual[3], expected[3], strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_what_is_traced_within_a_mode_is_neither_kept_nor_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5)), torch.ones(2, 4)

    def wrapped() -> torch.nn.Module:
        return session.wrap(copy.deepcopy(model), OrtConfig(), threads=1, onnx_dir=tmp_path)

    within, after, again = wrapped(), wrapped(), wrapped()
    with Reference():
        within(x)
    assert (within(x) != 0).all()
    assert (after(x) == 0).any()
    with Reference():
        again(x)
    assert (again(x) != 0).all()
    assert session.export_origins(after) == ["stored"]
    for one in (within, again):
        assert session.export_origins(one) == ["not stored: the mode Reference changes what torch's functions do"]


def test_the_facts_that_made_the_key_can_be_read(net: Path) -> None:
    start(net)
    (file,) = (net / "exports").glob("*.json")
    facts = json.loads(file.read_text())
    assert set(facts["user's files"]) >= {"net", "helper"}


def closure(contents: int | None) -> Callable[[float], float]:
    """A function with a cell, which is empty where there are no contents."""
    if contents is not None:
        factor = contents

    return lambda x: x * factor


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, hidden: int) -> None:
        self.__hidden = hidden
        self.shown = 0


class OneSlot:
    __slots__ = "name"

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("one", "other"),
    [(closure(None), closure(2)), (closure(3), closure(2)), (Slotted(1), Slotted(2)), (OneSlot("a"), OneSlot("b"))],
)
def test_what_an_attribute_holds_counts(one: object, other: object) -> None:
    """An empty cell is not an error, and slots with private names or of one name are not overlooked."""

    def modules(attribute: object) -> object:
        model = torch.nn.Linear(2, 2)
        model.attribute = attribute  # type: ignore[assignment]
        return described(model)

    assert modules(one) == modules(copy.copy(one)) != modules(other)


def test_old_exports_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_KEPT", 3)
    for width in (2, 3, 4):
        wrapped(torch.nn.Linear(4, width))(torch.rand(2, 4)).sum().backward()
    assert len(list(cache.folder().iterdir())) == 3


FACTOR = 1.5


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * FACTOR


DATA: list[Batch] = [{"x": torch.rand(4, 8), "labels": torch.randint(0, 3, (4,))} for _ in range(3)]


def check(*, evaluates: bool = False) -> list[str]:
    """Starts a run's check, which finds nothing; returns where the graphs came from. They are PyTorch's."""
    torch.manual_seed(0)
    model = Scaled()
    task = make_task(model, DATA[0])
    ort = wrapped(model)
    fitting = Fitting(ort, task, contextlib.nullcontext)
    assert fitting.findings(DATA) == []
    if evaluates:
        ort.eval()
        fitting.fit_evaluated(DATA[0])
    torch.testing.assert_close(task.loss(ort, DATA[1]), task.loss(model, DATA[1]))
    return session.export_origins(ort)


def tamper(file: Path) -> None:
    """Writes another factor into a kept graph, with a digest that is right."""
    graph = onnx.load_model_from_string(file.read_bytes()[32:])
    for node in graph.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and numpy_helper.to_array(attribute.t) == FACTOR:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t) * 2))
    content = graph.SerializeToString()
    file.write_bytes(hashlib.sha256(content).digest() + content)


def test_a_kept_graph_that_is_wrong_is_found_at_the_start_and_exported_anew() -> None:
    assert check() == ["stored"]
    (file,) = cache.folder().glob("*.onnx")
    content = file.read_bytes()
    tamper(file)
    assert file.read_bytes() != content
    assert check() == ["hit", "stored"]
    assert file.read_bytes() == content
    assert check() == ["hit"]


def test_a_kept_graph_for_evaluation_that_is_wrong_is_found_before_it_counts() -> None:
    check()
    (file,) = cache.folder().glob("*.onnx")
    assert check(evaluates=True) == ["hit", "stored"]
    (other,) = set(cache.folder().glob("*.onnx")) - {file}
    tamper(other)
    assert check(evaluates=True) == ["hit", "hit", "stored"]


def test_a_file_that_others_may_write_is_not_used() -> None:
    check()
    (file,) = cache.folder().glob("*.onnx")
    file.chmod(0o666)
    assert check() == [f"not stored: {file} can be written by every user"]


def test_where_nobody_compares_nothing_is_read() -> None:
    for _ in range(2):
        ort = wrapped(torch.nn.Linear(4, 3))
        ort(torch.rand(2, 4)).sum().backward()
        assert session.export_origins(ort) == ["stored"]


def test_the_second_start_infers_no_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [check(), check()] == [["stored"], ["hit"]]
    assert len(graphs) == 1


def test_an_inference_leaves_random_numbers_as_they_are() -> None:
    def infer(model: Any) -> Any:
        random.random()
        return model

    before = random.getstate()
    cache.keeping(infer)(onnx.ModelProto())
    assert random.getstate() == before
