"""Weights that are not what trainers expect train as in plain torch, or are refused in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ortlaunch.config.schema import DigitsConfig
from ortlaunch.data.loader import build_loader
from tests.integration.conftest import Train

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        self.add()

    def forward(self, pixel_values, labels):
        pixels = pixel_values.flatten(1)
        return nn.functional.cross_entropy(self.last(self.between(self.first(pixels).relu(), pixels)), labels)


class Scalar(Net):
    def add(self):
        self.scale = nn.Parameter(torch.tensor(0.6))

    def between(self, hidden, pixels):
        return hidden * self.scale.exp()


class Complex(Net):
    def add(self):
        self.rotated = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64) / 4)

    def between(self, hidden, pixels):
        return (hidden.to(torch.complex64) @ self.rotated).abs()


class Sparse(Net):
    def add(self):
        self.embedded = nn.Embedding(32, 16, sparse=True)

    def between(self, hidden, pixels):
        return hidden + self.embedded((pixels[:, :4].abs() * 7).long() % 32).mean(1)


class Empty(Net):
    def add(self):
        self.nothing = nn.Parameter(torch.zeros(0, 16))

    def between(self, hidden, pixels):
        return hidden + (hidden @ self.nothing.T).sum()
"""
STEPS = 6
RUN = (
    "data=digits",
    "backend=eager",
    "tracking=none",
    f"train.steps={STEPS}",
    "train.log_every=1",
    "scheduler=constant",
)
RUN += ("optimizer=sgd", "optimizer.lr=0.2", "optimizer.momentum=0", "train.clip_grad_norm=null", "seed=3")
DDP, FSDP = ("trainer=ddp",), ("trainer=fsdp",)
ZERO0, ZERO1, ZERO2, ZERO3 = (("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4))
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_nets", raising=False)
    return tmp_path


def plain_losses(name: str) -> list[float]:
    """Of plain torch in one process, on the batches of the two workers together."""
    import odd_nets  # type: ignore[import-not-found]

    model = getattr(odd_nets, name)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loaders = [build_loader(DigitsConfig(), batch_size=8, rank=rank, world_size=2, seed=3) for rank in range(2)]
    losses = []
    for parts in zip(*loaders, strict=False):
        loss = torch.stack([model(**part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == STEPS:
            return losses
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        *(("Scalar", ZERO3), ("Complex", DDP), ("Sparse", ZERO1)),
        *(pytest.param("Scalar", trainer, marks=NIGHTLY) for trainer in (DDP, ZERO0, ZERO1, ZERO2)),
        *(pytest.param("Sparse", trainer, marks=NIGHTLY) for trainer in (DDP, ZERO0, ZERO2, ZERO3, FSDP)),
        *(pytest.param("Empty", trainer, marks=NIGHTLY) for trainer in (DDP, ZERO0, ZERO1, ZERO2)),
    ],
)
def test_odd_weights_train_as_in_plain_torch(train: Train, folder: Path, name: str, trainer: tuple[str, ...]) -> None:
    words = ("model=factory", f"model.target=odd_nets:{name}", *RUN, "train.batch_size=8", *trainer)
    run = train(folder, *words, "train.checkpoint_every=3")
    assert run.status == "FINISHED", run.report
    assert list(run.losses.values()) == pytest.approx(plain_losses(name), rel=2e-5)
    resumed = train(folder, *words, f"train.resume={run.run_dir}/checkpoints/step-00000003")
    assert resumed.status == "FINISHED", resumed.report
    assert resumed.losses[STEPS] == pytest.approx(run.losses[STEPS], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "trainer", "words"),
    [
        ("Scalar", FSDP, "the model's 'scale' has no dimensions, which trainer=fsdp does not take"),
        ("Complex", FSDP, "the model's 'rotated' is complex, which trainer=fsdp does not take"),
        ("Complex", ZERO1, "the model's 'rotated' is complex, which trainer=deepspeed does not take"),
        ("Empty", FSDP, "the model's 'nothing' has no elements, which trainer=fsdp does not take"),
        (
            "Empty",
            ZERO3,
            "the model's 'nothing' has no elements, which trainer=deepspeed trainer.zero_stage=3 does not",
        ),
    ],
)
def test_weights_that_a_trainer_does_not_take_are_refused(
    train: Train, folder: Path, name: str, trainer: tuple[str, ...], words: str
) -> None:
    run = train(folder, "model=factory", f"model.target=odd_nets:{name}", *RUN, *trainer)
    assert run.is_request and words in run.error, run.report
