"""transformers' Conv1D as one node, without the views around it where these only take rows and give them back."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig
from ortlaunch.ort import session
from tests.ort.conftest import operators


class Net(nn.Module):
    """Rows through a Conv1D, viewed as it does it or in a way near it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(12, 16)
        self.conv = Conv1D(8, 16)
        self.narrow = Conv1D(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        batch, length = x.shape[:2]
        bias, weight = self.conv.bias, self.conv.weight
        match self.kind:
            case "two in turn":
                return self.narrow(torch.nn.functional.gelu(self.conv(hidden)))
            case "of four dimensions":
                return self.conv(hidden.view(batch, length, 1, 16))
            case "of two dimensions":
                return self.conv(hidden.flatten(0, 1))
            case "the rows are used":
                rows = torch.addmm(bias, hidden.view(-1, hidden.size(-1)), weight)
                return rows.view(batch, length, 8) * rows.sum()
            case "rows of other numbers":
                # Half of each row is a row here.
                rows = torch.addmm(self.narrow.bias, hidden.view(-1, 8), self.narrow.weight)
                return rows.view(batch, length, 16)
            case "another shape":
                return torch.addmm(bias, hidden.view(-1, hidden.size(-1)), weight).view(length, batch, 8)
            case "another width":
                return torch.addmm(bias, hidden.view(-1, hidden.size(-1)), weight).view(batch, length * 2, 4)
            case "transposed before":
                return self.conv(hidden.transpose(0, 1).contiguous())
        return self.conv(hidden)


@pytest.mark.parametrize(
    ("kind", "views"),
    [
        *[(kind, 0) for kind in ("one", "two in turn", "transposed before")],
        # The view as four dimensions is the model's own.
        ("of four dimensions", 1),
        ("of two dimensions", 1),
        *[(kind, None) for kind in ("the rows are used", "rows of other numbers", "another shape", "another width")],
    ],
)
def test_gradients_are_eagers_and_views_as_rows_are_gone(kind: str, views: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = Net(kind)
    cfg = OrtConfig(debug=OrtDebugConfig(save_onnx=True))
    ort = session.wrap(copy.deepcopy(eager), cfg, threads=1, onnx_dir=tmp_path)
    for rows, length in ((2, 6), (3, 4), (1, 1)):
        x = torch.randn(rows, length, 12)
        for each in (eager, ort):
            each.zero_grad()
            out = each(x)
            (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        torch.testing.assert_close(ort(x), eager(x))
        for name, parameter in eager.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(ort.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    assert session.is_active(ort)
    found = operators(tmp_path)
    assert "ortlaunch::conv1d_trained" in found
    assert views is None or ("Reshape" in found) == bool(views)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_a_frozen_part_has_no_gradient_and_the_others_have_eagers(frozen: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = Net("one")
    if frozen == "input":
        eager.first.requires_grad_(False)
    else:
        getattr(eager.conv, frozen).requires_grad_(False)
    ort = session.wrap(copy.deepcopy(eager), OrtConfig(), threads=1, onnx_dir=None)
    x = torch.randn(2, 5, 12)
    for each in (eager, ort):
        each(x).square().sum().backward()
    for name, parameter in eager.named_parameters():
        mine = ort.get_parameter(name).grad
        if parameter.grad is None:
            assert mine is None, name
        else:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-4)
