"""RMSNorm, LayerNorm without weight or bias, and chains of operators that onnxruntime's fusions take for either."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig
from ortlaunch.ort import session
from tests.ort.conftest import Wrap, operators
from tests.ort.precise import Case, assert_as_in_fp64


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


class Own(torch.nn.Module):
    """Parameters of a normalization that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.rand(8) + 0.5) for _ in range(2))
        self.epsilon = torch.nn.Parameter(torch.tensor(0.3))


def scaled(x: Tensor, epsilon: Any = 0.3, power: int = 2) -> Tensor:
    """RMSNorm where the power is 2."""
    return x * torch.rsqrt(x.pow(power).mean(-1, keepdim=True) + epsilon)


def centered(x: Tensor, power: int = 2) -> Tensor:
    """LayerNorm where the power is 2."""
    around = x - x.mean(-1, keepdim=True)
    return around / torch.sqrt(around.pow(power).mean(-1, keepdim=True) + 0.3)


def chain(function: Any) -> Case:
    return Case(function, [(5, 8)], modules=[Own()])


CHAINS = {
    "whole": lambda x, own: own.weight * scaled(x),
    "one_weight_for_all": lambda x, own: own.weight[:1] * scaled(x),
    "one_weight_divided": lambda x, own: own.weight[2:3] * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 0.3)),
    "a_computed_weight": lambda x, own: own.weight.mean(0, keepdim=True) * scaled(x),
    "one_value_and_many_weights": lambda x, own: own.weight * scaled(x[..., :1]),
    "over_two_axes": lambda x, own: own.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 0.3)),
    "a_matrix_over_two_axes": lambda x, own: (
        own.weight[None] * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 0.3))
    ),
    "a_vector": lambda x, own: own.weight[:1] * scaled(x[0, 0]),
    "weights_that_are_activations": lambda x, own: x[0, 0] * scaled(x),
    "another_exponent": lambda x, own: own.weight * scaled(x, power=4),
    "a_learned_epsilon": lambda x, own: own.weight * scaled(x, own.epsilon),
    "an_epsilon_first": lambda x, own: own.weight * (x * torch.rsqrt(own.epsilon + x.pow(2).mean(-1, keepdim=True))),
    "centered": lambda x, own: centered(x) * own.weight + own.bias,
    "centered_one_weight_and_bias_for_all": lambda x, own: centered(x) * own.weight[:1] + own.bias[:1],
    "centered_one_weight_for_all": lambda x, own: centered(x) * own.weight[:1] + own.bias,
    "centered_one_bias_for_all": lambda x, own: centered(x) * own.weight + own.bias[:1],
    "centered_another_exponent": lambda x, own: centered(x, power=4) * own.weight + own.bias,
}


def test_chains_like_a_normalization(to_ort: Wrap) -> None:
    torch.manual_seed(0)
    assert_as_in_fp64(to_ort, {name: chain(function) for name, function in CHAINS.items()})


class Written(torch.nn.Module):
    """A normalization that is written out, of hidden states."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.own = kind, torch.nn.Linear(6, 8), Own()

    def forward(self, x: Tensor) -> Tensor:
        return CHAINS[self.kind](self.linear(x), self.own)


@pytest.mark.parametrize("kind", ["whole", "centered"])
@pytest.mark.parametrize("torch_kernels", [True])
def test_in_double_precision_the_epsilon_is_the_models(to_ort: Wrap, kind: str) -> None:
    torch.manual_seed(0)
    model = Written(kind).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(to_ort(model)(x), model(x))


@pytest.mark.parametrize(
    ("kind", "fused"), [("whole", "SimplifiedLayerNormalization"), ("centered", "LayerNormalization")]
)
def test_a_normalization_is_still_fused(kind: str, fused: str, tmp_path: Path) -> None:
    model = Written(kind)
    cfg = OrtConfig(torch_kernels=False, debug=OrtDebugConfig(save_onnx=True))
    ort = session.wrap(copy.deepcopy(model), cfg, threads=1, onnx_dir=tmp_path)
    ort(torch.randn(2, 3, 6)).sum().backward()
    assert fused in operators(tmp_path)
