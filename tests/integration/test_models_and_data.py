"""Built-in models and data sources, trained for some steps by two real workers."""

from __future__ import annotations

import numpy
import pytest

SHORT = ("train.log_every=5", "tracking=none")


# A ready job trains resnet in CI.
@pytest.mark.parametrize("model", ["mlp", pytest.param("resnet", marks=pytest.mark.nightly), "vit"])
def test_image_models_train_on_digits(train, tmp_path, model):
    """model=NAME alone is enough: the images come with it. The mlp on the default backend, the others on eager."""
    backend = () if model == "mlp" else ("backend=eager",)
    learning = ("train.steps=40", "train.batch_size=32", "optimizer.lr=0.001")
    result = train(tmp_path, f"model={model}", *backend, *learning, *SHORT)
    assert result.status == "FINISHED", result.report
    assert result.losses[40] < 0.95 * result.losses[1]
    assert result.tags["ortlaunch.ort_active"] == ("false" if backend else "true")


@pytest.mark.nightly
def test_text_of_the_users_own(train, tmp_path):
    """A folder, of which a text that repeats itself is soon learnt. CI trains on a text in test_documentation.py."""
    (tmp_path / "corpus").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "corpus" / name).write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = ("data=text", "data.path=corpus", "data.seq_len=32", "train.steps=40", "optimizer.lr=0.003")
    result = train(tmp_path, *data, "backend=eager", *SHORT)
    assert result.status == "FINISHED", result.report
    assert result.losses[40] < 3.0 < result.losses[1]


def test_tokens_of_the_users_own(train, tmp_path):
    """data=tokens: ids in a .bin file without a header; ids that count up are soon learnt."""
    numpy.tile(numpy.arange(100, dtype=numpy.uint16), 200).tofile(tmp_path / "train.bin")
    data = ("data=tokens", "data.path=train.bin", "data.seq_len=32", "train.steps=40", "optimizer.lr=0.003")
    result = train(tmp_path, *data, "backend=eager", *SHORT)
    assert result.status == "FINISHED", result.report
    assert result.losses[40] < 3.0 < result.losses[1]


OWN = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


@dataclass
class Pair:
    x: torch.Tensor
    y: float


class Pairs(Dataset):
    def __init__(self, width=4):
        self.width = width

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return Pair(torch.full((self.width,), float(index)), float(index))


class Stream(IterableDataset):
    def __iter__(self):
        yield from map(Pairs().__getitem__, range(21))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, pair):
        return (self.out(pair.x).squeeze(1) - pair.y).square().mean()
"""
"""Samples that are dataclasses."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.target=own:Pairs", "data.workers=1"], ""),
        (["data.target=own:Stream", "data.shard=true"], ""),
        (["data.target=own:Stream"], "all workers read the same samples first"),
        (["data.target=own:Stream", "data.workers=2"], "all loader processes of a worker read the same samples first"),
        (["data.target=own:Pairs", "data.params.width=3"], "(x (2, 3) float32, y (2,) float64): "),
        (["data.target=own:Pairs", "backend=ort"], "does not support input type <class 'own.Pair'>"),
    ],
)
def test_data_of_ones_own_train_or_are_refused_at_once(train, tmp_path, words, said):
    (tmp_path / "own.py").write_text(OWN)
    own = ("model=factory", "model.target=own:Net", "data=factory", "backend=eager", "train.batch_size=2")
    run = train(tmp_path, *own, *words, "train.steps=8", "train.log_every=1", "tracking=none")
    assert (said in run.error) and bool(said) == bool(run.error) == run.is_request, run.report
    if "data.params.width=3" in words:
        assert "own.py:" in run.error
