"""Operators under ORTModule beside PyTorch in fp64: several of them in one model, so that they cost one export."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ortlaunch.ort import session
from tests.ort.parity import compared

SMALLEST, WIDER = 1e-5, 20.0
"""An error up to the first, or up to the second times that of PyTorch in fp32, is rounding."""


@dataclass
class Case:
    """An operator, its inputs and its modules."""

    function: Callable[..., Tensor]
    """Takes the floating-point inputs, the integer inputs and the modules."""
    shapes: Sequence[tuple[int, ...]] = ((5, 4),)
    """Of one sample of each floating-point input; each element has a weight of its own."""
    integers: Sequence[tuple[tuple[int, ...], int]] = ()
    """Shape of one sample of each integer input, and the number of its values."""
    modules: Sequence[nn.Module] = ()
    positive: bool = False
    """Whether the floating-point inputs are above 0.1."""
    frozen: Sequence[int] = ()
    """Floating-point inputs without a weight, which need no gradient."""


class Operators(nn.Module):
    """All operators side by side; each has inputs and weights of its own."""

    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.cases = cases
        self.weights = nn.ModuleDict(
            {
                name: nn.ParameterList(
                    nn.Parameter(torch.rand(shape) + 0.5) for i, shape in enumerate(case.shapes) if i not in case.frozen
                )
                for name, case in cases.items()
            }
        )
        self.used = nn.ModuleDict({name: nn.ModuleList(case.modules) for name, case in cases.items()})

    def forward(self, inputs: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        outputs = {}
        for name, case in self.cases.items():
            weights = iter(self.weights[name])
            floats = [
                x if i in case.frozen else x * next(weights) for i, x in enumerate(inputs[name][: len(case.shapes)])
            ]
            outputs[name] = case.function(*floats, *inputs[name][len(case.shapes) :], *self.used[name])
        return outputs


@dataclass
class Batch:
    """Inputs of all operators."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """The inputs with this floating-point dtype."""
        return {
            name: [x.to(dtype) if x.is_floating_point() else x for x in tensors]
            for name, tensors in self.inputs.items()
        }


def draw(cases: dict[str, Case], samples: int) -> Batch:
    """Draws inputs of some samples from torch's generator."""
    batch = Batch()
    for name, case in cases.items():
        floats = [torch.randn(samples, *shape) for shape in case.shapes]
        floats = [x.abs() + 0.1 if case.positive else x for x in floats]
        batch.inputs[name] = [*floats, *(torch.randint(0, n, (samples, *shape)) for shape, n in case.integers)]
    return batch


def assert_as_in_fp64(to_ort: Callable[..., nn.Module], cases: dict[str, Case], seed: int = 0) -> None:
    """Checks outputs and gradients of all operators under ORTModule against PyTorch in fp64, for two batch sizes."""
    torch.manual_seed(seed)
    assert_model_as_in_fp64(to_ort, Operators(cases), *(draw(cases, samples) for samples in (2, 3)))


def assert_model_as_in_fp64(to_ort: Callable[..., nn.Module], single: nn.Module, *batches: Any) -> None:
    """Checks outputs and gradients of a model in fp32 under ORTModule against PyTorch in fp64 on some inputs."""
    double, ort = copy.deepcopy(single).double(), to_ort(single)
    for batch in batches:
        expected = _results(double, batch.to(torch.float64))
        eager, actual = (_results(model, batch.to(torch.float32)) for model in (single, ort))
        allowed, errors = (compared(expected, {n: x.double() for n, x in got.items()}) for got in (eager, actual))
        wrong = {name: error for name, error in errors.items() if error > max(SMALLEST, WIDER * allowed[name])}
        assert wrong == {}
    assert session.is_active(ort)


def _results(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    outputs = model(inputs)
    outputs = outputs if isinstance(outputs, dict) else {"output": outputs}
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for output in outputs.values():
        weights = torch.linspace(0.5, 1.5, output.numel(), dtype=loss.dtype).reshape(output.shape)
        loss = loss + ((output * output + output) * weights).sum()
    loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: output.detach() for name, output in outputs.items()}, **gradients}
