"""Convolutions with groups, and what ``padding="same"`` is in numbers; see also `test_mend_operators`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onnx import TensorProto, helper

from ortlaunch.ort.graphs.corrections import pad_explicitly


class Grouped(torch.nn.Module):
    """Layers as Mamba's: values that later gradients need lie beside the gradient of each convolution."""

    def __init__(self, kind: type[torch.nn.Module], layers: int) -> None:
        super().__init__()
        self.before = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(layers))
        self.convolutions = torch.nn.ModuleList(kind(16, 16, 3, padding=1, groups=16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for before, convolution in zip(self.before, self.convolutions, strict=True):
            hidden = before(x).transpose(1, -1)
            x = x + torch.tanh(convolution(hidden).transpose(1, -1) * torch.sigmoid(hidden.transpose(1, -1)))
        return x


@pytest.mark.parametrize("torch_kernels", [True, False])
@pytest.mark.parametrize(("kind", "sizes"), [(torch.nn.Conv1d, (24,)), (torch.nn.Conv3d, (4, 3, 5))])
def test_the_gradient_with_groups_leaves_other_values_alone(
    assert_parity: Any, kind: type[torch.nn.Module], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = Grouped(kind, layers=4)
    assert_parity(model, *({"x": torch.randn(batch, *sizes, 16)} for batch in (4, 3)), tolerance=1e-5)


@pytest.mark.parametrize(("mode", "pads"), [("SAME_UPPER", [1, 4, 2, 4]), ("SAME_LOWER", [2, 4, 1, 4])])
def test_an_odd_remainder_goes_where_the_mode_says(mode: str, pads: list[int]) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[4, 5], dilations=[1, 2], auto_pad=mode)
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)])
    pad_explicitly(graph)
    found = {one.name: helper.get_attribute_value(one) for one in graph.node[0].attribute}
    assert found == {"kernel_shape": [4, 5], "dilations": [1, 2], "pads": pads}
