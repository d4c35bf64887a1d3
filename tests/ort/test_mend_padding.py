"""Padding by reflection, by the edge and around, whose gradients onnxruntime lacks for the first two."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

MODES = ("reflect", "replicate", "circular")


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Padded(torch.nn.Module):
    """Padding between two convolutions, with one width per side."""

    def __init__(self, mode: str, widths: tuple[int, ...]) -> None:
        super().__init__()
        convolution = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[len(widths) // 2]
        self.first, self.last = convolution(2, 3, 1), convolution(3, 2, 2)
        self.mode, self.widths = mode, widths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(self.first(x), self.widths, mode=self.mode)
        return self.last(padded + padded.mean())


def draws(seed: int) -> list[tuple[str, tuple[int, ...]]]:
    generator = random.Random(seed)
    return [(mode, tuple(generator.choices(range(4), k=2 * axes))) for mode in MODES for axes in (1, 2, 3)]


CUT = [("circular", (2, -1)), ("circular", (-1, 2, 1, -1))]
"""Padding on one side, and elements cut off on the other one."""


@pytest.mark.parametrize(("mode", "widths"), [*draws(seed=2), *CUT], ids=str)
def test_padding(assert_parity: Any, mode: str, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    sizes = [(5, 6, 4)[: len(widths) // 2], (6, 4, 5)[: len(widths) // 2]]
    assert_parity(Padded(mode, widths), *({"x": torch.randn(2, 2, *size)} for size in sizes), tolerance=5e-6)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_convolution_with_padding_mode(assert_parity: Any, mode: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode=mode),
        torch.nn.ReLU(),
        torch.nn.Conv2d(3, 2, 3, padding="same", padding_mode=mode),
    )
    assert_parity(model, {"input": torch.randn(2, 2, 6, 7)}, tolerance=5e-6)
