"""How many steps epochs and tokens are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.trainer.duration import in_steps
from ortlaunch.trainer.workers import Workers


def counted(*words: str, batches: int | None = 10) -> Any:
    loader: Any = SimpleNamespace(batches_per_epoch=batches, origin="data=mine")
    config = to_config(compose(["model=mlp", *words]))
    first = {"input_ids": torch.zeros(4, 8, dtype=torch.long)}
    return in_steps(config, loader, first, Workers(0, 2, torch.device("cpu"), 1)).train


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["train.steps=7"], 7),
        (["train.epochs=2"], 20),
        (["train.epochs=2", "train.grad_accumulation=3"], 7),
        (["train.epochs=0.25"], 3),
        (["train.epochs=0.01"], 1),
        (["train.tokens=640"], 10),
        (["train.tokens=641", "train.grad_accumulation=2"], 6),
    ],
)
def test_a_run_is_as_long_as_it_must_be(words: list[str], steps: int) -> None:
    assert counted(*words).steps == steps
    assert counted(*words).counts_steps


def test_what_is_due_each_epoch_is_due_after_its_last_step() -> None:
    train = counted("train.eval_every=epoch", "train.checkpoint_every=4", "train.grad_accumulation=3")
    assert (train.eval_every, train.checkpoint_every, train.log_every) == (4, 4, 10)


@pytest.mark.parametrize("words", [["train.epochs=2"], ["train.log_every=epoch"]])
def test_a_stream_has_no_epochs(words: list[str]) -> None:
    with pytest.raises(RequestError, match=r"data=mine is a stream, whose length is not known: give numbers of steps"):
        counted(*words, batches=None)
