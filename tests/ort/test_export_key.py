"""Whatever a forward's code reads outside of the model's attributes is part of the export cache's key.

Models are generated: each is made of several fragments, and a fragment reads one value in one of the ways that Python
has. Setting one value differently must change the key, and setting all of them to the same must not, also in a process
with another seed for Python's hashes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.ort.cache import key as export_key
from ortlaunch.ort.cache.files import NotCacheableError
from ortlaunch.ort.cache.reachable_code import ReachableCode
from ortlaunch.ort.cache.values import Describe
from ortlaunch.ort.mends import buffers
from tests.ort.drawn_program import CLASS, HEAD, WAYS, Drawn, importable
from tests.ort.ways_of_reading import Fragment
from tests.ort.ways_refused import REFUSED, UNKNOWN

GROUPS = 12
"""Models that are drawn; each way of reading a value is in one of them."""
Draw = Callable[[list[Fragment]], Drawn]


@pytest.fixture
def draw(tmp_path: Path) -> Iterator[Draw]:
    with importable(tmp_path):
        yield lambda fragments: Drawn(tmp_path, fragments).write()


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_the_forward_reads_is_part_of_the_key(draw: Draw, way: str) -> None:
    program = draw([WAYS[way]])
    first = program.key([1.0])
    assert program.key([1.0]) == first
    assert program.key([3.0]) != first


@pytest.mark.parametrize("group", range(GROUPS))
def test_each_value_of_a_drawn_model_is_part_of_the_key(draw: Draw, group: int) -> None:
    ways = random.Random(0).sample(sorted(WAYS), len(WAYS))[group::GROUPS]
    program = draw([WAYS[way] for way in ways])
    same = [1.0] * len(ways)
    first = program.key(same)
    assert program.key(same) == first
    for number, way in enumerate(ways):
        changed = [3.0 if index == number else 1.0 for index in range(len(ways))]
        assert program.key(changed) != first, way


def test_processes_with_other_seeds_of_hashes_have_the_same_key(draw: Draw, tmp_path: Path) -> None:
    draw(list(WAYS.values()))
    command = [sys.executable, "-m", "tests.ort.drawn_program", str(tmp_path), *WAYS]
    begun = [
        subprocess.Popen(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        for seed in ("1", "4")
    ]
    one, other = (process.communicate(timeout=250)[0].split() for process in begun)
    assert [process.returncode for process in begun] == [0, 0]
    assert one[-1] == other[-1]


@pytest.mark.parametrize("way", REFUSED)
def test_a_value_that_cannot_be_described_is_not_cached(draw: Draw, way: str) -> None:
    with pytest.raises(NotCacheableError):
        draw([REFUSED[way]]).key([1.0])


@pytest.mark.parametrize("place", ["forward", pytest.param("module", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_known_beforehand_is_not_cached(tmp_path: Path, draw: Draw, what: str, place: str) -> None:
    program = draw([])
    define, expression = UNKNOWN[what]
    is_an_import = define.startswith(("import", "from")) and "\n" not in define
    before = f"        {define}\n" if place == "forward" and is_an_import else ""
    body = CLASS.format(init="", forward=f"{before}        x = x * {expression}", members="")
    (tmp_path / "drawn_model.py").write_text(HEAD + ("" if before else define) + body)
    with pytest.raises(NotCacheableError):
        program.key([])


def test_built_in_models_have_the_same_key_twice() -> None:
    from ortlaunch.config.schema import ModelConfig
    from ortlaunch.models.registry import build_model

    for name in ("gpt2_nano", "mlp", "resnet", "vit"):
        one, other = (export_key.model_facts(build_model(ModelConfig(name=name))) for _ in range(2))
        assert one == other


def test_the_order_of_modules_and_parameters_is_part_of_the_key() -> None:
    one = torch.nn.ModuleDict({"a": torch.nn.ReLU(), "b": torch.nn.Linear(2, 2)})
    other = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 2), "a": torch.nn.ReLU()})
    assert export_key.model_facts(one) != export_key.model_facts(other)


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_values_of_a_buffer_that_is_not_saved_are_part_of_the_key(is_saved: bool) -> None:
    """They are constants of the graph. Those of a saved one are its inputs."""

    def facts(value: float) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        model[0].register_buffer("rates", torch.full((2,), value), persistent=is_saved)
        return export_key.model_facts(model)

    assert facts(1.0) == facts(1.0)
    assert (facts(1.0) == facts(2.0)) is is_saved


def test_a_buffer_that_a_graph_has_moved_is_an_input_and_no_part_of_the_key() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(()), persistent=False)
    facts = []
    for value in (1.0, 2.0):
        buffers.update(model, ["count"], [torch.tensor(value)])
        facts.append(export_key.model_facts(model))
    assert facts[0] == facts[1]


def test_a_base_of_several_classes_is_looked_at_once_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers has hundreds of classes; most of the time went into their common bases."""
    rounds: list[list[tuple[type, bool]]] = [[]]
    usual = ReachableCode._members

    def looked_at(reached: ReachableCode, cls: type, *, is_made: bool) -> bool:
        rounds[-1].append((cls, is_made))
        if cls is torch.Tensor:
            rounds.append([])
        return usual(reached, cls, is_made=is_made)

    monkeypatch.setattr(ReachableCode, "_members", looked_at)
    export_key.model_facts(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Tanh()))
    assert (torch.nn.Module, False) in rounds[0]
    assert all(len(one) == len(set(one)) for one in rounds)


def _missing(_: Any) -> Any:
    raise ValueError("install me first")


Unreadable = type("Unreadable", (), {"__class__": property(_missing)})
"""As a stand-in of a package that tells at each read that something is missing."""


def test_a_value_that_cannot_be_read_is_refused_or_left_out() -> None:
    with pytest.raises(NotCacheableError, match=r"the model\.part cannot be read: ValueError"):
        Describe(None).value("the model.part", Unreadable())
    described = Describe(None, must_be_complete=False).value("the model.part", [1, Unreadable()])
    assert ["not described", "Unreadable"] in described[1]
