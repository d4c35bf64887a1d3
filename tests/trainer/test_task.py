"""How a model is called, and where its loss comes from."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.task import Batch, loss_of, make_task
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.workers import Workers

IMAGES: Batch = {"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.tensor([0, 1])}


class ByName(torch.nn.Module):
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        assert labels is not None
        return {"loss": pixel_values.mean()}


class ByPosition(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.flatten(1)[:, :10]


class NeedsMore(torch.nn.Module):
    def forward(self, pixel_values: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        return pixel_values


class Anything(torch.nn.Module):
    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        assert set(inputs) == {"pixel_values"}
        return inputs["pixel_values"].sum()


def test_names_that_forward_knows_are_passed_by_name() -> None:
    task = make_task(ByName(), IMAGES)
    assert task.by_name == ("pixel_values", "labels")
    assert task.loss(ByName(), IMAGES) == IMAGES["pixel_values"].mean()


def test_a_main_input_of_another_name_goes_by_position_and_the_loss_is_cross_entropy() -> None:
    task = make_task(ByPosition(), IMAGES)
    assert (task.by_position, task.by_name) == (("pixel_values",), ())
    expected = functional.cross_entropy(IMAGES["pixel_values"].flatten(1)[:, :10], IMAGES["labels"])
    assert task.loss(ByPosition(), IMAGES) == expected


def test_labels_go_only_to_a_model_that_names_them() -> None:
    assert make_task(Anything(), IMAGES).loss(Anything(), IMAGES) == IMAGES["pixel_values"].sum()


class Takes(torch.nn.Module):
    """A forward of one input, or of two and a third that it can do without."""

    def forward(self, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None = None) -> torch.Tensor:
        return (first * second).sum() + (0 if third is None else third.sum())


@dataclass
class Whole:
    x: torch.Tensor


class TakesWhole(torch.nn.Module):
    def forward(self, batch: Whole) -> torch.Tensor:
        return batch.x.sum()


def test_a_tuple_goes_by_position_and_anything_else_as_one_argument() -> None:
    one, image = torch.ones(2), IMAGES["pixel_values"]
    assert make_task(Takes(), (one, one)).loss(Takes(), (one, one)) == 2
    assert make_task(Takes(), [one, one, one]).loss(Takes(), [one, one, one]) == 4
    # Without its labels, where forward has no place for them.
    whole = (image, IMAGES["labels"])
    assert make_task(ByPosition(), whole).loss(ByPosition(), whole) == make_task(ByPosition(), IMAGES).loss(
        ByPosition(), IMAGES
    )
    assert make_task(TakesWhole(), Whole(one)).loss(TakesWhole(), Whole(one)) == 2
    for wrong in ((one,), (one,) * 5):
        with pytest.raises(
            RequestError, match=f"takes first, second, third and the data gives a tuple of {len(wrong)}"
        ):
            make_task(Takes(), wrong)


def test_a_first_entry_of_another_name_is_passed_over_where_the_first_parameter_has_its_own() -> None:
    batch = {"number": torch.tensor([1, 2]), **IMAGES}
    assert make_task(ByName(), batch).by_position == ()


def test_an_argument_that_the_data_does_not_give_is_named() -> None:
    with pytest.raises(RequestError, match="depth"):
        make_task(NeedsMore(), IMAGES)


def test_float_labels_mean_squared_error() -> None:
    batch = {"x": torch.ones(3, 1), "labels": torch.tensor([1.0, 2.0, 3.0])}
    assert loss_of(torch.ones(3, 1), batch) == pytest.approx(5.0 / 3.0)


@pytest.mark.parametrize(
    "outputs",
    [
        torch.tensor(2.5),
        (torch.tensor(2.5), torch.ones(3)),
        {"loss": torch.tensor(2.5)},
        {"loss": torch.tensor([[2.5]])},
    ],
)
def test_a_models_own_loss_is_taken(outputs: object) -> None:
    loss = loss_of(outputs, IMAGES)
    assert loss == 2.5 and loss.dim() == 0


def test_a_loss_for_each_sample_is_refused_with_its_shape() -> None:
    with pytest.raises(RequestError, match=r"\(2,\): return one number"):
        loss_of({"loss": torch.ones(2)}, IMAGES)


def test_logits_that_do_not_fit_the_labels_are_refused_with_both_shapes() -> None:
    with pytest.raises(RequestError, match=r"\(3, 10\).*\(2,\)"):
        loss_of(torch.ones(3, 10), IMAGES)


@pytest.mark.parametrize(
    ("outputs", "described"),
    [
        ({"hidden": torch.ones(1)}, "a dict with 'hidden'"),
        ({}, "an empty dict"),
        ((), "an empty tuple"),
        ("text", "a str"),
        (0.5, "a float"),
        (None, "None"),
    ],
)
def test_outputs_without_loss_or_logits_are_refused_and_named(outputs: object, described: str) -> None:
    with pytest.raises(RequestError, match=f"^the model's output, {described}, holds no loss"):
        loss_of(outputs, IMAGES)


class Detached(torch.nn.Module):
    """A model with a usual slip: the loss has gone through NumPy, ``.item()`` or ``.detach()``."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(pixel_values.flatten(1)), labels).detach()


def test_a_loss_that_depends_on_no_parameter_is_refused_before_its_backward() -> None:
    model, config = Detached(), to_config(compose(["model=mlp", "device=cpu"]))
    engine = TorchEngine(model, config, Workers(0, 1, torch.device("cpu"), threads=1), make_task(model, IMAGES))
    with pytest.raises(RequestError, match="depends on none of the parameters"):
        engine.micro_step(IMAGES, last=True)
    with torch.no_grad():
        assert engine.evaluate(IMAGES).loss > 0
