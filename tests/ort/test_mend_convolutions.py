"""``padding="same"`` under ONNX Runtime: eager's outputs and gradients for every kernel, dilation and dimension."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper

from ortlaunch.ort.mends.convolutions import pad_explicitly

KINDS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


class Same(torch.nn.Module):
    """Two convolutions, so that the second one's input needs a gradient too."""

    def __init__(self, kind: type[torch.nn.Module], kernel: int, dilation: int, groups: int, padding: str) -> None:
        super().__init__()
        self.first = kind(4, 4, kernel, padding=padding, dilation=dilation)
        self.last = kind(4, 8, kernel, padding=padding, dilation=dilation, groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("seed", range(8))
def test_same_padding_has_eagers_gradients(assert_parity: Any, seed: int) -> None:
    chooser = random.Random(seed)
    dimensions, kernel, dilation = chooser.randint(1, 3), chooser.randint(1, 5), chooser.randint(1, 2)
    torch.manual_seed(seed)
    model = Same(KINDS[dimensions - 1], kernel, dilation, chooser.choice((1, 2, 4)), "same")
    sizes = [chooser.randint(5, 9) for _ in range(dimensions)]
    assert_parity(model, *({"x": torch.randn(batch, 4, *sizes)} for batch in (2, 3)), tolerance=1e-5)


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


@pytest.mark.parametrize("kernel", [2, 3])
def test_valid_padding_and_padding_as_a_word_of_the_function_too(assert_parity: Any, kernel: int) -> None:
    class Functional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)
            self.weight = torch.nn.Parameter(torch.randn(4, 4, kernel, kernel))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv2d(self.linear(x), self.weight, padding="same")

    torch.manual_seed(0)
    assert_parity(Functional(), {"x": torch.randn(2, 4, 7, 6)}, tolerance=1e-5)
    assert_parity(Same(torch.nn.Conv2d, kernel, 1, 1, "valid"), {"x": torch.randn(2, 4, 7, 6)}, tolerance=1e-5)


@pytest.mark.parametrize(("mode", "pads"), [("SAME_UPPER", [1, 4, 2, 4]), ("SAME_LOWER", [2, 4, 1, 4])])
def test_an_odd_remainder_goes_where_the_mode_says(mode: str, pads: list[int]) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[4, 5], dilations=[1, 2], auto_pad=mode)
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)])
    pad_explicitly(graph)
    found = {one.name: helper.get_attribute_value(one) for one in graph.node[0].attribute}
    assert found == {"kernel_shape": [4, 5], "dilations": [1, 2], "pads": pads}
