"""RMSNorm, which the exporter does not know, and LayerNorm without weight or bias, which ORTModule exports wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Net(torch.nn.Module):
    def __init__(self, normalization: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 8)
        self.normalization = normalization

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalization(self.linear(x))


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(2, 3, 6)}, {"x": 1e-3 * torch.randn(5, 4, 6)}]


@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}], ids=str)
def test_rms_norm(assert_parity: Any, options: dict[str, Any]) -> None:
    normalization = torch.nn.RMSNorm(8, **options)
    if normalization.weight is not None:
        torch.nn.init.normal_(normalization.weight)
    assert_parity(Net(normalization), *batches(), tolerance=1e-5)


def test_rms_norm_over_two_dimensions(assert_parity: Any) -> None:
    assert_parity(Net(lambda x: functional.rms_norm(x, (3, 8))), {"x": torch.randn(2, 3, 6)}, tolerance=1e-5)


@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}, {}], ids=str)
def test_layer_norm(assert_parity: Any, options: dict[str, Any]) -> None:
    assert_parity(Net(torch.nn.LayerNorm(8, eps=1e-4, **options)), *batches(), tolerance=1e-5)
