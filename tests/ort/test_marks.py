"""The nodes of a training graph are noted in the order in which they are computed, and their results stay."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig, OrtLogLevel
from ortlaunch.ort import session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = self.conv(h)
        return nn.functional.huber_loss(h, x)


def test_each_node_is_noted_with_its_module_and_line_before_it_is_computed(to_ort: Any) -> None:
    session.import_ortmodule()
    from ortlaunch.ort import marks

    torch.manual_seed(0)
    eager, lines = Net(), []
    debug = OrtDebugConfig(log_level=OrtLogLevel.info)
    with marks.noted(lambda line: lines.append(json.loads(line))):
        ort = to_ort(eager, OrtConfig(export_cache=False, debug=debug))
        for size in (3, 5):
            lines.clear()
            x = torch.randn(size, 6, 8)
            eager.zero_grad()
            ort.zero_grad()
            losses = [model(x) for model in (eager, ort)]
            forward = [dict(line) for line in lines]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[1], losses[0])
            for name, parameter in ort.named_parameters():
                torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
    named = [line["operator"] for line in forward]
    assert named.index("onnx::Tanh") < named.index("onnx::Conv") < named.index("aten::huber_loss")
    (conv,) = (line for line in forward if line["operator"] == "onnx::Conv")
    assert conv["module"] == "conv"
    assert conv["statement"] == "h = self.conv(h)"
    assert conv["location"].endswith(f"test_marks.py:{Net.forward.__code__.co_firstlineno + 2}")
    backward = lines[len(forward) :]
    (grad,) = (line for line in backward if line["operator"] == "com.microsoft::ConvGrad")
    assert (grad["module"], grad["statement"]) == ("conv", "h = self.conv(h)")


def test_nothing_is_noted_of_graphs_that_are_made_later(to_ort: Any) -> None:
    session.import_ortmodule()
    from ortlaunch.ort import marks

    lines: list[bytes] = []
    with marks.noted(lines.append):
        pass
    to_ort(Net(), OrtConfig(export_cache=False))(torch.randn(3, 6, 8)).backward()
    assert not lines
