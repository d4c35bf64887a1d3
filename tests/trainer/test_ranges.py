"""Token ids and labels beyond what a model knows: refused before the first step, else named where a step fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.trainer.ranges import Ranges, explained


class Net(nn.Module):
    """A language model that does with its ids what a test wants."""

    def __init__(self, rows: int = 256, classes: int = 256, positions: int = 64, change: Any = lambda ids: ids) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(rows, 4), nn.Embedding(positions, 4)
        self.head, self.change = nn.Linear(4, classes), change

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        places = self.places(torch.arange(input_ids.shape[1]))
        logits = self.head(self.tokens(self.change(input_ids)) + places)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def config(*words: str) -> Config:
    return to_config(compose(["model=factory", "model.target=nets:Net", "data=synthetic", "device=cpu", *words]))


def batch(ids: int = 3, label: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((2, length), ids), "labels": torch.full((2, length), label)}


def refusal(net: nn.Module, given: dict[str, torch.Tensor], *words: str, **data: Any) -> str:
    """What is said of a model and its data before the first step; empty where nothing is."""
    with Ranges(given) as ranges:
        net(**{name: one[:1] for name, one in given.items()})
    try:
        ranges.check(config(*words), SimpleNamespace(**{"vocab_size": None, "num_classes": None} | data))  # type: ignore[arg-type]
    except RequestError as error:
        return str(error)
    return ""


def test_more_ids_or_classes_than_the_model_knows_are_refused_with_the_key() -> None:
    said = refusal(Net(rows=100), batch(), "model.params.rows=100", vocab_size=256)
    assert said == "the data has 256 token ids and the model's embedding knows 100: set model.params.rows=256"
    said = refusal(Net(classes=90), batch(), vocab_size=256)
    assert said.startswith("the data has 256 token ids and the model's cross entropy knows 90: raise that number ")
    images = {"pixel_values": torch.ones(2, 4), "labels": torch.tensor([1, 2])}
    mlp = nn.Linear(4, 5)
    mlp.forward = lambda pixel_values, labels: functional.cross_entropy(  # type: ignore[method-assign]
        functional.linear(pixel_values, mlp.weight), labels
    )
    said = refusal(mlp, images, "model.params.output_dim=5", num_classes=10)
    assert said == "the data has 10 classes and the model's cross entropy knows 5: set model.params.output_dim=10"


def test_a_first_batch_is_looked_at_where_the_data_does_not_say_how_many_there_are() -> None:
    given = batch()
    given["input_ids"][1, 0] = 200
    assert refusal(Net(rows=100), given).startswith("an embedding of the model gets the id 200 and knows 0 to 99: ")
    given = batch()
    given["labels"][1, 0] = -1
    assert refusal(Net(), given).startswith("the data has the label -1 and the model knows 0 to 255: ")


def test_what_a_model_makes_of_its_ids_is_its_own_matter() -> None:
    """Clamped ids, shares of classes, labels that are left out."""
    assert refusal(Net(rows=100, change=lambda ids: ids.clamp(max=99)), batch(), vocab_size=256) == ""
    given = batch()
    given["labels"][1] = -100
    assert refusal(Net(), given, vocab_size=256) == ""
    shares = {"pixel_values": torch.ones(2, 4), "labels": torch.ones(2, 5) / 5}
    net = nn.Linear(4, 5)
    net.forward = lambda pixel_values, labels: functional.cross_entropy(  # type: ignore[method-assign]
        functional.linear(pixel_values, net.weight), labels
    )
    assert refusal(net, shares, num_classes=10) == ""


@pytest.mark.parametrize(
    ("net", "given", "said"),
    [
        (
            Net(rows=100, change=torch.clone),
            batch(ids=200),
            "an embedding of the model gets the id 200 and knows 0 to 99",
        ),
        (Net(), batch(label=300), "the data has the label 300 and the model knows 0 to 255"),
        (Net(positions=16), batch(length=32), "lower data.seq_len to 16, or raise that number"),
    ],
    ids=["id", "label", "position"],
)
def test_an_error_of_a_later_step_names_the_id_or_label(
    net: nn.Module, given: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        net(**given)
    found = explained(caught.value, config())
    assert isinstance(found, TrainingError) and said in str(found) and "\n" not in str(found)
    assert f"({__file__}, in forward)" in str(found), "the line of the user's own code"


def test_other_errors_stay_as_they_are() -> None:
    for error in (IndexError("list index out of range"), RuntimeError("no"), KeyError("x")):
        assert explained(error, config()) is error
    compiled = explained(RuntimeError("index out of bounds: 0 <= tmp4 < 100L"), config())
    assert isinstance(compiled, TrainingError) and "backend=eager names it" in str(compiled)
