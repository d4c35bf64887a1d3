"""Models whose weights, buffers or ways are unlike those of most, for digits."""

from __future__ import annotations

import os

import torch
from torch import nn


class Gaps(nn.Module):
    """Weights that are parts of the memory of larger ones, as pruning leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(64, 24), nn.Linear(16, 10)
        self.wide.weight = nn.Parameter(torch.randn(24, 96)[:, :64] / 8)
        self.wide.bias = nn.Parameter(torch.zeros(48)[::2])
        self.last.weight = nn.Parameter(torch.randn(10, 24)[:, :16] / 4)
        # Two names of one layer.
        self.again = self.last

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = (self.wide(pixel_values.flatten(1)))[:, :16].relu()
        return self.last(hidden) + self.again(hidden.tanh())


class Strides(nn.Module):
    """Dense weights whose memory is in another order than their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.last = nn.Linear(4 * 64, 10)
        self.last.weight = nn.Parameter(torch.randn(256, 10).t() / 16)
        self.to(memory_format=torch.channels_last)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(pixel_values).relu()).relu().flatten(1))


class Turns(nn.Module):
    """Branches that are used in turn."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))
        self.last = nn.Linear(16, 10)
        self.every, self.forwards = every, 0

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        branch = self.branches[self.forwards // self.every % 2]
        self.forwards += self.training
        return self.last(branch(pixel_values.flatten(1)).relu())


class Drawn(nn.Module):
    """Weights and buffers from a generator that each worker seeds in its own way."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2, generator=own)
        self.last.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(16, generator=own))
        self.register_buffer("scale", torch.rand(16, generator=own) + 0.5, persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(pixel_values.flatten(1)).relu() * self.scale + self.shift)


class Views(nn.Module):
    """Buffers that are parts of one memory, or one row several times, of which each worker has its own."""

    def __init__(self, is_ddp: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        memory = torch.zeros(3, 32)
        self.register_buffer("left", memory[:2, :16])
        self.register_buffer("right", memory[1:, 16:])
        # DDP sends no such buffer, and sends the others before each forward.
        self.register_buffer("row", torch.zeros(1, 16).expand(1 if is_ddp else 4, 16))
        self.register_buffer("all", memory)
        self.is_ddp = is_ddp
        self.own: torch.Tensor | None = None

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(pixel_values.flatten(1)).relu()
        if not self.training:
            return self.last(hidden + self.left[0] - self.right[1] + self.row[-1] + 3 * self.all[0, :16])
        if not self.is_ddp and self.own is not None:
            assert self.own.equal(self.all), "an evaluation has left another worker's buffers behind"
        with torch.no_grad():
            mean = hidden.mean(0)
            self.left.copy_(mean)
            self.right.copy_(2 * mean)
            self.row[:1].copy_(mean)
        self.own = self.all.clone()
        return self.last(hidden)
