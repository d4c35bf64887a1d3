"""A model's own ``train()`` is called under ONNX Runtime when PyTorch calls it, and at no other time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ortlaunch.config.schema import OrtConfig
from ortlaunch.models import modes
from ortlaunch.ort import session


class Listens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[bool] = []
        self.linear = nn.Linear(4, 4)

    def train(self, mode: bool = True) -> Listens:
        self.heard.append(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Outer(nn.Module):
    """`Listens` is a part of it, and frozen in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Listens()
        self.last = nn.Linear(4, 4)
        self.part.training = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


def test_wrapping_and_exporting_call_no_train_of_the_models_own(tmp_path: Path) -> None:
    model = Outer()
    wrapped = session.wrap(model, OrtConfig(), threads=1, onnx_dir=tmp_path)
    wrapped(torch.ones(2, 4)).sum().backward()
    assert model.part.heard == []
    assert not model.part.training
    with modes.evaluation(wrapped), torch.no_grad():
        wrapped(torch.ones(2, 4))
    assert model.part.heard == [False, True]
    wrapped(torch.ones(2, 4)).sum().backward()
    assert model.part.heard == [False, True]
    model.train()
    assert model.part.heard == [False, True, True]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Listens(), Listens()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_of_its_own_graph_hears_each_call_once(tmp_path: Path) -> None:
    model = Blocks()
    session.wrap_blocks(model, OrtConfig(), threads=1, onnx_dir=tmp_path)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    with modes.evaluation(model), torch.no_grad():
        model(x)
    model(x).sum().backward()
    assert [block.heard for block in model.blocks] == [[False, True]] * 2
