"""Which modules of a model become blocks, and what is said where there are none."""

from __future__ import annotations

import pytest
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.registry import build_model
from ortlaunch.ort.find_blocks import find_blocks

SMALL_BERT = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
SMALL_LLAMA = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}


class Tower(nn.Module):
    """Two lists; the longer one's modules hold a list of the same class each."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.body = nn.ModuleDict({"steps": nn.ModuleList(Step() for _ in range(4))})
        self.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
        self.bare = nn.ModuleList(nn.ReLU() for _ in range(9))


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


@pytest.mark.parametrize(
    ("name", "params", "paths"),
    [
        ("gpt2_nano", {"n_layer": 3}, [f"transformer.h.{index}" for index in range(3)]),
        ("bert", SMALL_BERT, [f"bert.encoder.layer.{index}" for index in range(3)]),
        ("llama", SMALL_LLAMA, [f"model.layers.{index}" for index in range(3)]),
    ],
)
def test_the_layers_of_a_transformers_model_are_found(name: str, params: dict[str, int], paths: list[str]) -> None:
    assert list(find_blocks(build_model(ModelConfig(name=name, params=params)), None)) == paths


def test_of_other_models_the_longest_list_of_one_class_is_taken() -> None:
    assert list(find_blocks(Tower(), None)) == [f"body.steps.{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("wanted", "paths"),
    [
        ("Step", [f"body.steps.{index}" for index in range(4)]),
        ("short.*", ["short.0", "short.1"]),
        ("body.steps.[12]", ["body.steps.1", "body.steps.2"]),
        ("mixed.*", ["mixed.0", "mixed.2", "mixed.4"]),
        # The star stays within one name, so what lies deeper is no block.
        ("body.*", ["body.steps"]),
    ],
)
def test_blocks_are_chosen_by_class_or_by_path(wanted: str, paths: list[str]) -> None:
    assert list(find_blocks(Tower(), wanted)) == paths


def test_a_block_within_a_block_is_none() -> None:
    outer = nn.Module()
    outer.first = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    outer.second = nn.Sequential(nn.Linear(2, 2))
    assert list(find_blocks(outer, "Sequential")) == ["first", "second"]


def test_a_model_without_repeated_blocks_is_refused_with_the_way_out() -> None:
    with pytest.raises(RequestError) as caught:
        find_blocks(build_model(ModelConfig(name="mlp")), None)
    for words in ("no repeated blocks", "backend.blocks=", "trainer.zero_stage=2", "backend=eager"):
        assert words in str(caught.value)


def test_a_name_that_matches_nothing_is_refused_with_the_classes_that_repeat() -> None:
    with pytest.raises(RequestError, match=r"backend\.blocks=Stpe: matches no module .*Step"):
        find_blocks(Tower(), "Stpe")
    with pytest.raises(RequestError, match=r"backend\.blocks=bare\.\*: matches only modules without parameters"):
        find_blocks(Tower(), "bare.*")


def test_blocks_that_checkpoint_themselves_are_refused() -> None:
    model = build_model(ModelConfig(name="gpt2_nano"))
    model.gradient_checkpointing_enable()
    with pytest.raises(RequestError, match=r"transformer\.h\.0 .*gradient checkpointing"):
        find_blocks(model, None)
