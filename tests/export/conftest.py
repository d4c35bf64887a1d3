"""Small models of each kind, and batches for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Net(nn.Module):
    """An image classifier with all that behaves otherwise in train mode, a tied weight and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=0.2)
        self.drop = nn.Dropout(0.25)
        self.wide = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64, bias=False)
        self.again.weight = self.wide.weight
        self.idle = nn.Linear(3, 3)
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values, labels=None):
        hidden = self.drop(torch.relu(self.norm(self.conv(pixel_values)))).mean(1).flatten(1)
        logits = self.head(torch.tanh(self.again(torch.tanh(self.wide(hidden)))))
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


@pytest.fixture
def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"pixel_values": torch.randn(4, 1, 8, 8), "labels": torch.randint(10, (4,))} for _ in range(3)]
