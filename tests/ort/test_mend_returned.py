"""Outputs of a model keep their values while the backward, and later steps, run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig
from ortlaunch.ort import session
from tests.ort.conftest import operators

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: (x / 4).exp(),
    "softmax": lambda x: x.softmax(-1),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "add": lambda x: x + 1,
    "scale": lambda x: x * 3,
    "root": lambda x: (x * x + 1).sqrt(),
    "view": lambda x: x.view(-1, 4),
    "transpose": lambda x: x.transpose(0, 1),
    "nothing": lambda x: x,
    "not": lambda x: torch.logical_not(x > 0),
    "place": lambda x: x.argmax(-1) + 1,
}


class Chain(torch.nn.Module):
    """Linear layers with functions between them; some of the values on the way are outputs, under their names."""

    def __init__(self, functions: list[str], returned: set[int]) -> None:
        super().__init__()
        self.functions, self.returned = functions, returned
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in functions)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = {}
        for index, (layer, name) in enumerate(zip(self.layers, self.functions, strict=True)):
            x = layer(x)
            value = FUNCTIONS[name](x)
            if index in self.returned or not value.is_floating_point():
                outputs[f"{index} {name}"] = value
            if value.shape == x.shape and value.is_floating_point():
                x = value
        return outputs | {"logits": x}


def drawn(count: int, seed: int) -> list[tuple[list[str], set[int]]]:
    generator = random.Random(seed)
    names = list(FUNCTIONS)
    chains = []
    for index in range(count):
        functions = [names[index % len(names)], *generator.choices(names, k=generator.randint(1, 3))]
        chains.append((functions, {0, generator.randrange(len(functions))}))
    return chains


CHAINS = drawn(15, seed=5)
# Products of the gradient of the third output and sums, which onnxruntime cannot fuse.
CHAINS += [(["tanh", "exp", "relu", "add"], {0, 1, 2}), (["softmax", "transpose", "nothing", "not"], {0, 2})]


def kept(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in outputs.items()}


def cases() -> list[Any]:
    """Every chain with PyTorch's kernels, and some with ONNX Runtime's alone, as on the GPU."""
    names = [f"{index}-{'-'.join(functions)}" for index, (functions, _) in enumerate(CHAINS)]
    ours = [pytest.param(index, True, id=f"torch_kernels-{name}") for index, name in enumerate(names)]
    theirs = [pytest.param(index, False, id=f"ort_kernels-{name}") for index, name in enumerate(names) if index % 4 < 1]
    return [*ours, *theirs, pytest.param(len(names) - 2, False, id=f"ort_kernels-{names[-2]}")]


@pytest.mark.parametrize(("index", "torch_kernels"), cases())
def test_outputs_keep_their_values(to_ort: Any, index: int) -> None:
    torch.manual_seed(index)
    eager = Chain(*CHAINS[index])
    ort, x = to_ort(eager), torch.randn(4, 8)
    expected, outputs = eager(x), ort(x)
    before = kept(outputs)
    assert list(outputs) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for values in (expected, outputs):
        torch.stack([value.square().sum() for value in values.values() if value.requires_grad]).sum().backward()
    for (name, mine), theirs in zip(ort.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    # Memory that was freed is used by what comes next.
    for _ in range(2):
        ort(torch.randn(4, 8))["logits"].sum().backward()
    for name, value in before.items():
        assert torch.equal(outputs[name], value), name
    assert session.is_active(ort)


def test_a_large_output_of_a_linear_layer_is_not_copied(to_ort: Any, tmp_path: Path) -> None:
    model = to_ort(Chain(["nothing", "nothing"], set()), OrtConfig(debug=OrtDebugConfig(save_onnx=True)))
    model(torch.randn(4, 8))["logits"].sum().backward()
    assert "detach_copy" not in operators(tmp_path / "onnx")
