"""Integers of all sizes and booleans beside numbers and tensors of other types: what each form gives, in which dtype.

The forms are generated: each function takes each type with each other operand, as far as PyTorch computes it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortlaunch.ort import session

Wrap = Callable[..., nn.Module]
Function = Callable[[Tensor, Any], Tensor]

KINDS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = {"whole": 2, "fraction": 2.5, "below": -1.5, "large": 300, "true": True}
OF_TRUTHS = ("sums", "comparisons", "choices")
"""Groups of functions that people give True to."""
TENSORS = {"small": torch.uint8, "long": torch.int64, "float": torch.float32}
"""Dtypes of the other operands that are tensors; a function takes one of them, or a number."""

FUNCTIONS: dict[str, tuple[Function, ...]] = {
    "sums": (operator.add, lambda a, b: a - b, lambda a, b: b - a),
    "products": (operator.mul, lambda a, b: a**b, lambda a, b: b ** (a % 3)),
    "divisions": (operator.truediv, lambda a, b: a // b, lambda a, b: a % b, lambda a, b: b // a.clamp(min=1)),
    "limits": (
        lambda a, b: a.clamp(min=b),
        lambda a, b: a.clamp(max=b),
        lambda a, b: torch.maximum(a, b),
    ),
    "comparisons": (operator.eq, operator.ne, operator.lt, operator.ge),
    "choices": (
        lambda a, b: torch.where(a > 1, a, b),
        lambda a, b: torch.where(a == 0, b, a),
        lambda a, b: a.masked_fill(a > 0, b),
    ),
}
ALONE: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda a: a.any(), lambda a: a.all(), lambda a: a.any(1), lambda a: a.all(-1, keepdim=True)),
    *(lambda a: a.sum(1), lambda a: a.sum(dim=[]), lambda a: a.cumsum(1), lambda a: a.prod(1), lambda a: a.amax(1)),
    *(lambda a: a.argmin(1), lambda a: a.argmax(), lambda a: a.sort(1)[0], lambda a: a.diff(dim=1)),
    *(lambda a: a.float().mean(1), lambda a: a.sum(dtype=torch.float32) / 7, lambda a: a == True),  # noqa: E712
)


@dataclass
class Form:
    """A function with the types of its operands."""

    function: Callable[..., Tensor]
    kind: str
    other: str | None = None

    def of(self, values: dict[str, Tensor]) -> Tensor:
        """Returns the function of these tensors, or of one of them and a number."""
        if self.other is None:
            return self.function(values[self.kind])
        other = NUMBERS[self.other] if self.other in NUMBERS else values[self.other]
        return self.function(values[self.kind], other)


class Promoted(nn.Module):
    """Returns what each form gives, and something to train."""

    def __init__(self, forms: dict[str, Form]) -> None:
        super().__init__()
        self.forms = forms
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: form.of(values) for name, form in self.forms.items()}
        return {**found, "trained": values["float"] * self.weight}


def drawn(samples: int) -> dict[str, Tensor]:
    whole = {str(kind): torch.randint(0, 5, (samples, 3, 4)) for kind in KINDS}
    below = {str(kind): whole[str(kind)] - 2 for kind in (torch.int8, torch.int16, torch.int32, torch.int64)}
    # The largest of the small ones, so that sums of them wrap.
    whole[str(torch.uint8)][:, 0, 0], below[str(torch.int8)][:, 0, 0] = 250, 120
    kinds = {str(kind): {**whole, **below}[str(kind)].to(kind) for kind in KINDS}
    others = {"small": torch.randint(1, 4, (samples, 3, 4), dtype=torch.uint8), "long": torch.randint(1, 4, (1, 4))}
    return {**kinds, **others, "float": torch.randn(samples, 3, 4)}


def valid(forms: Iterator[tuple[str, Form]], *batches: dict[str, Tensor]) -> dict[str, Form]:
    """The forms that PyTorch computes."""
    found = {}
    for name, form in forms:
        with contextlib.suppress(RuntimeError, TypeError):
            for values in batches:
                form.of(values)
            found[name] = form
    return found


def assert_as_in_eager(to_ort: Wrap, forms: dict[str, Form], *batches: dict[str, Tensor]) -> None:
    eager = Promoted(forms)
    ort = to_ort(eager)
    for values in batches:
        expected, actual = eager(values), ort(values)
        wrong = []
        for name in expected:
            try:
                torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6, equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
        assert wrong == []
        actual["trained"].sum().backward()
    assert session.is_active(ort)


@pytest.mark.parametrize("group", FUNCTIONS)
def test_integers_beside_other_types(to_ort: Wrap, group: str) -> None:
    torch.manual_seed(0)
    batches = drawn(2), drawn(3)
    forms = (
        (f"{group} {index} of {kind} and {other}", Form(function, str(kind), other))
        for index, function in enumerate(FUNCTIONS[group])
        for kind in KINDS
        for other in (*NUMBERS, *TENSORS)
        if other != "true" or group in OF_TRUTHS
    )
    assert_as_in_eager(to_ort, valid(forms, *batches), *batches)


def test_integers_are_clamped_to_fractions(to_ort: Wrap) -> None:
    """The exporter gave them integers as limits, and no error."""
    limits: tuple[Function, ...] = (
        *(lambda a, b: a.clamp(min=b), lambda a, b: a.clamp(max=b), lambda a, b: torch.clip(a, -b, b)),
        *(torch.clamp_min, torch.clamp_max, lambda a, b: a.clamp(max=torch.tensor(b))),
    )
    forms = {
        f"{index} of {kind}": Form(function, str(kind), "fraction")
        for index, function in enumerate(limits)
        for kind in (torch.int32, torch.int64)
    }
    torch.manual_seed(0)
    assert_as_in_eager(to_ort, forms, drawn(2), drawn(3))


def test_integers_alone(to_ort: Wrap) -> None:
    torch.manual_seed(0)
    batches = drawn(2), drawn(3)
    forms = (
        (f"{index} of {kind}", Form(function, str(kind))) for index, function in enumerate(ALONE) for kind in KINDS
    )
    assert_as_in_eager(to_ort, valid(forms, *batches), *batches)


def test_what_is_not_zero_is_true(to_ort: Wrap) -> None:
    """Fractions, numbers that cancel each other, NaN, and zeros of both signs."""
    values = {
        "fractions": torch.tensor([[0.3, -0.3], [0.0, 0.2], [0.0, -0.0]]),
        "nan": torch.tensor([[0.0, float("nan")], [1.0, float("nan")], [0.0, 0.0]]),
        "whole": torch.tensor([[-1, 1], [0, -2], [0, 0]]),
        "float": torch.ones(3, 4),
    }
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        *(torch.any, torch.all, lambda a: a.any(1), lambda a: a.all(1), lambda a: a.any((0, 1), keepdim=True)),
        *(lambda a: a[0, 0].any(), lambda a: a[0, 0].all(0), lambda a: a.any(dim=())),
    )
    forms = (
        (f"{index} of {kind}", Form(function, kind))
        for index, function in enumerate(functions)
        for kind in ("fractions", "nan", "whole")
    )
    assert_as_in_eager(to_ort, dict(forms), values)
