"""Batch normalization in models whose parameters are in bf16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortlaunch.trainer.statistics import normalize_in_fp32


def lowered(model: nn.Module) -> nn.Module:
    """As DeepSpeed does it: parameters in bf16, buffers as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(6), (8, 6)),
        (nn.BatchNorm1d(6, momentum=None), (8, 6, 3)),
        (nn.BatchNorm2d(6, eps=1e-3), (4, 6, 5, 3)),
        (nn.BatchNorm3d(6), (2, 6, 3, 4, 2)),
        (nn.BatchNorm2d(6, affine=False), (4, 6, 5, 3)),
        (nn.BatchNorm2d(6, track_running_stats=False), (4, 6, 5, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_it_is_batch_normalization_in_fp32(norm: nn.Module, shape: tuple[int, ...], is_copied: bool) -> None:
    torch.manual_seed(0)
    norm = copy.deepcopy(norm)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    low = lowered(norm)
    exact = copy.deepcopy(norm).float()
    model = nn.Sequential(low)
    normalize_in_fp32(model)
    model = copy.deepcopy(model) if is_copied else model
    for _ in range(3):
        x = torch.randn(shape).bfloat16().requires_grad_()
        output = model(x)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), exact(x.float()), rtol=1e-2, atol=1e-2)
        output.float().square().sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
    for one in model.parameters():
        assert one.grad is not None and one.grad.dtype == torch.bfloat16 and bool(one.grad.any())
    for mine, other in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.eval()(x).float(), exact.eval()(x.float()), rtol=1e-2, atol=1e-2)
    assert list(model.state_dict()) == [f"0.{name}" for name in exact.state_dict()]
