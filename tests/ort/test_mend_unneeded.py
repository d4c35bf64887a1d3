"""Operators of which only some inputs need a gradient: values from outside or from a frozen part, frozen parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig
from tests.ort.conftest import operators
from tests.support.nightly import first_in_ci

SOURCES = ("input", "frozen", "no_grad", "detached", "trained", "trained")
"""Where a value comes from; half of them need a gradient in the long run."""


@dataclass
class Draw:
    operator: str
    sources: tuple[str, ...]
    """Of each value and parameter of the operator."""
    shape: tuple[int, ...]
    option: int

    def __str__(self) -> str:
        return "-".join([self.operator, *self.sources])


OPERANDS = {"layer_norm": 3, "group_norm": 3, "attention": 3, "addmm": 3, "linear": 3}


def draws(count: int, seed: int) -> list[Draw]:
    generator = random.Random(seed)
    found = []
    for index in range(count):
        operator = list(OPERANDS)[index % len(OPERANDS)]
        # The first value may come from anywhere; a parameter is trained, frozen or computed.
        sources = [generator.choice(SOURCES) for _ in range(OPERANDS[operator])]
        if not {"trained"} & set(sources):
            sources[generator.randrange(len(sources))] = "trained"
        shape = (generator.randint(1, 3), generator.randint(2, 5), 2 * generator.randint(2, 4))
        found.append(Draw(operator, tuple(sources), shape, generator.randrange(3)))
    return found


DRAWS = draws(20, seed=15)


class Drawn(torch.nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.layers = torch.nn.ModuleList(torch.nn.Linear(draw.shape[-1], draw.shape[-1]) for _ in draw.sources)
        for layer, source in zip(self.layers, draw.sources, strict=True):
            layer.requires_grad_(source != "frozen")
        self.after = torch.nn.Linear(draw.shape[-1], 3)

    def values(self, x: torch.Tensor, index: int) -> torch.Tensor:
        source, layer = self.draw.sources[index], self.layers[index]
        if source == "input":
            return x * (index + 1)
        with torch.set_grad_enabled(source != "no_grad"):
            hidden = layer(x)
        return hidden.detach() if source == "detached" else hidden

    def parameter(self, index: int) -> torch.Tensor:
        """A vector that is a parameter itself, or a copy without gradient."""
        bias = self.layers[index].bias
        return bias if self.draw.sources[index] in ("trained", "frozen") else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, option = self.draw.shape[-1], self.draw.option
        match self.draw.operator:
            case "layer_norm":
                weight = self.parameter(1) + 1 if option else self.parameter(1)
                return self.after(functional.layer_norm(self.values(x, 0), (size,), weight, self.parameter(2)))
            case "group_norm":
                values = self.values(x, 0).transpose(1, 2)
                hidden = functional.group_norm(values, 2, self.parameter(1), self.parameter(2))
                return self.after(hidden.transpose(1, 2))
            case "addmm":
                bias = self.parameter(0) if option else self.values(x, 0).flatten(0, 1)
                weight = self.layers[2].weight
                weight = weight if self.draw.sources[2] in ("trained", "frozen") else weight.detach()
                return self.after(torch.addmm(bias, self.values(x, 1).flatten(0, 1), weight))
            case "linear":
                return self.after(functional.linear(self.values(x, 0), self.layers[1].weight, self.parameter(2)))
        query, key, value = (self.values(x, index).unflatten(-1, (2, -1)).transpose(1, 2) for index in range(3))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if option == 1 else None
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=option == 2)
        return self.after(mixed.transpose(1, 2).flatten(2))


def batch(draw: Draw, rows: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(draw.shape[0] + rows, *draw.shape[1:])}


@pytest.mark.parametrize(
    "index", first_in_ci(range(len(DRAWS)), 6), ids=[f"{index}-{draw}" for index, draw in enumerate(DRAWS)]
)
def test_each_input_gets_the_gradient_that_it_needs(assert_parity: Any, index: int) -> None:
    torch.manual_seed(index)
    draw = DRAWS[index]
    assert_parity(Drawn(draw), batch(draw), batch(draw, 1), tolerance=5e-6)


@pytest.mark.parametrize("torch_kernels", [False], ids=["ort_kernels"])
@pytest.mark.parametrize("index", range(0, 20, 7))
def test_onnx_runtimes_own_kernels_do_so_too(assert_parity: Any, index: int) -> None:
    torch.manual_seed(index)
    assert_parity(Drawn(DRAWS[index]), batch(DRAWS[index]), tolerance=5e-6)


class First(torch.nn.Module):
    """A normalization as the first layer, or behind a backbone without gradients."""

    def __init__(self, normalization: torch.nn.Module, backbone: bool) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(8, 8) if backbone else None
        self.normalization = normalization
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.backbone is not None:
            with torch.no_grad():
                x = self.backbone(x)
        return self.head(self.normalization(x))


@pytest.mark.parametrize("backbone", [False, True], ids=["first", "backbone"])
@pytest.mark.parametrize("make", [torch.nn.LayerNorm, lambda size: torch.nn.GroupNorm(2, 4)], ids=["layer", "group"])
def test_a_normalization_of_values_without_gradient(assert_parity: Any, make: Any, backbone: bool) -> None:
    torch.manual_seed(0)
    model = First(make(8), backbone)
    for parameter in model.normalization.parameters():
        torch.nn.init.normal_(parameter)
    assert_parity(model, {"x": torch.randn(3, 4, 8)}, {"x": torch.randn(5, 4, 8)}, tolerance=5e-6)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_of_group_norm(assert_parity: Any, frozen: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GroupNorm(2, 8), torch.nn.Linear(8, 2))
    getattr(model[1], frozen).requires_grad_(False)
    assert_parity(model, {"input": torch.randn(3, 8)}, tolerance=5e-6)


def test_the_gradient_of_an_input_that_needs_none_is_not_computed(to_ort: Any, tmp_path: Path) -> None:
    model = to_ort(torch.nn.Linear(8, 8), OrtConfig(debug=OrtDebugConfig(save_onnx=True)))
    model(torch.randn(3, 8)).sum().backward()
    found = operators(tmp_path / "onnx")
    assert "ortlaunch::linear_grad_weight" in found
    assert "ortlaunch::linear_grad_x" not in found


class ComputedTwice(torch.nn.Module):
    """Two layers on values without gradient that are written down twice, and that ONNX Runtime computes once."""

    def __init__(self, values: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.values = values
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.values(x)) * self.layers[1](self.values(x))


@pytest.mark.parametrize("values", [lambda x: x[:, 0], lambda x: torch.sin(x[:, 1]) * 2], ids=["slice", "computed"])
def test_values_that_are_computed_twice_alike(assert_parity: Any, values: Any) -> None:
    torch.manual_seed(0)
    assert_parity(ComputedTwice(values), {"x": torch.randn(3, 4, 8)}, {"x": torch.randn(5, 4, 8)}, tolerance=5e-6)


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_a_cell_whose_first_state_is_its_first_input(assert_parity: Any, kind: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = (x[:, 0], x[:, 1]) if kind is torch.nn.LSTMCell else x[:, 0]
            for row in range(3):
                state = self.cell(x[:, row], state)
            return state[0] if isinstance(state, tuple) else state

    torch.manual_seed(0)
    assert_parity(Model(), {"x": torch.randn(3, 4, 8)}, {"x": torch.randn(5, 4, 8)}, tolerance=5e-6)


def test_attention_to_zeros(assert_parity: Any) -> None:
    """The same zeros follow keys and values."""

    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = torch.nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attend(x, x, x, need_weights=False)[0]

    assert_parity(Attending(), {"x": torch.randn(2, 5, 8)}, {"x": torch.randn(3, 4, 8)})


def test_two_batch_norms_without_parameters(assert_parity: Any) -> None:
    """Their weights are equal constants, of which ONNX Runtime makes one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    for _ in range(2):
        model.extend([torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8, affine=False)])
    assert_parity(model, {"input": torch.randn(6, 8)}, {"input": torch.randn(4, 8)}, tolerance=5e-5)
