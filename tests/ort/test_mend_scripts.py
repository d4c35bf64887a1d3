"""What torch.jit has compiled, what a model may return, and switches that a trace gives as tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortlaunch.base.errors import RequestError
from tests.ort.precise import Case, assert_as_in_fp64

Wrap = Callable[..., nn.Module]


@torch.jit.script
def branching(x: Tensor) -> Tensor:
    y = x * 2
    if y.size(0) > 1:
        y = y + 1
    return y


@torch.jit.script
def looping(x: Tensor) -> Tensor:
    for _ in range(x.size(1)):
        x = x * 0.9 + 0.1
    return x


@dataclasses.dataclass
class Output:
    """What a model may return in eager training."""

    logits: Tensor


class Net(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.scale)


def test_a_compiled_module_is_refused_by_its_name(to_ort: Wrap) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4)))
    with pytest.raises(RequestError, match=r"^1 is compiled by torch\.jit"):
        to_ort(model)(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("function", "statement"),
    [(lambda x: branching(x), "if y.size(0) > 1:"), (lambda x: looping(x), "for _ in range(x.size(1)):")],
)
def test_a_compiled_branch_or_loop_is_refused_with_its_line(
    to_ort: Wrap, function: Callable[[Tensor], Tensor], statement: str
) -> None:
    with pytest.raises(RequestError, match=rf"`{re.escape(statement)}` at .*test_mend_scripts.py:\d+ is a branch"):
        to_ort(Net(function))(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("function", "kind"), [(Output, "Output"), (lambda x: (x, x.shape), "torch.Size"), (lambda x: (x, {1}), "'set'")]
)
def test_a_value_that_no_graph_returns_is_refused_by_its_type(
    to_ort: Wrap, function: Callable[[Tensor], Any], kind: str
) -> None:
    with pytest.raises(RequestError, match=rf"returns a value of .*{kind}"):
        to_ort(Net(function))(torch.randn(2, 4))


def test_gradients_are_switched_by_a_comparison_of_sizes(to_ort: Wrap) -> None:
    def switched(x: Tensor, *, least: int) -> Tensor:
        with torch.set_grad_enabled(x.size(1) > least):
            y = x.sin()
        return x * y

    cases = {str(least): Case(lambda x, least=least: switched(x, least=least), [(4,)]) for least in (3, 30)}
    assert_as_in_fp64(to_ort, cases)
