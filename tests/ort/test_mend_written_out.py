"""Splits and sums whose sizes follow the batch, and operators in fp64, which ONNX Runtime's CPU kernels lack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ortlaunch.ort import session
from tests.ort.precise import Case, assert_as_in_fp64

Wrap = Callable[..., nn.Module]
SHAPE = (6, 4)
"""Of one sample; the batches of a test differ in size."""


def turned(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    """Joins parts the other way round, each with a factor of its own."""
    return torch.cat([part * (place + 1) for place, part in enumerate(reversed(parts))], dim)


SPLITS: dict[str, Callable[[Tensor], Tensor]] = {
    "of_the_batch": lambda x: turned(x.tensor_split(2), 0),
    "more_than_there_are": lambda x: turned(torch.tensor_split(x, 4, dim=1), 1),
    "at_places": lambda x: turned(torch.tensor_split(x, (1, -2), dim=1), 1),
    "at_places_in_a_tensor": lambda x: turned(x.tensor_split(torch.tensor([1, 2]), dim=-1), -1),
    "sections_by_name": lambda x: turned(x.tensor_split(sections=3, dim=2), 2),
    "hsplit": lambda x: turned(torch.hsplit(x, 2), 1),
    "hsplit_at_places": lambda x: turned(x.hsplit([1, 4]), 1),
    "hsplit_of_a_vector": lambda x: x * turned(x[0, 0].hsplit(2), 0),
    "vsplit": lambda x: turned(torch.vsplit(x, [1]), 0),
    "dsplit": lambda x: turned(x.dsplit(2), 2),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of_a_dimension": lambda x: x * x.sum_to_size(x.size(0), 1, 4),
    "of_all_samples": lambda x: x * x.sum_to_size(6, 4),
    "of_both": lambda x: x * x.sum_to_size(torch.Size((1, 4))),
    "of_none": lambda x: x * x.sum_to_size(x.shape),
}
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: functional.max_pool2d(x, 2),
    "mean": lambda x: functional.avg_pool2d(x, 2),
}
"""Of three dimensions, which are one image without a batch."""


@pytest.mark.parametrize("group", [SPLITS, SUMS, POOLS], ids=["splits", "sums", "pools"])
def test_results_and_gradients_are_those_of_fp64(to_ort: Wrap, group: dict[str, Callable[[Tensor], Tensor]]) -> None:
    assert_as_in_fp64(to_ort, {name: Case(function, [SHAPE]) for name, function in group.items()})


DOUBLES: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("sin", "cos", "erf", "relu")},
    "leaky_relu": functional.leaky_relu,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "matmul": lambda x: x @ x.mT @ x,
    "bmm": lambda x: torch.bmm(x.mT, x),
    "baddbmm": lambda x: torch.baddbmm(x, x @ x.mT, x),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "cat": lambda x: torch.cat([x, x.tanh()], 1)[:, 2:8],
    "stack": lambda x: torch.stack([x, x.tanh()], 1)[:, :, 2:],
    "conv": lambda x: functional.conv1d(x, torch.linspace(-1, 1, 36, dtype=x.dtype).reshape(6, 6, 1)),
}


def test_fp64_is_pytorchs(to_ort: Wrap) -> None:
    cases = {
        name: Case(lambda x, function=function: function(x.double()).to(x.dtype), [SHAPE])
        for name, function in DOUBLES.items()
    }
    assert_as_in_fp64(to_ort, cases)


class Small(nn.Module):
    """Operators in fp16, and one whose gradient is zero without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        half = (x * self.weight).half()
        largest = torch.maximum(half, half * 0.5 + 0.25) + torch.minimum(half, half * 0.5)
        return largest.float() + half.erf().float() + torch.sgn(x * self.weight)


def test_fp16_and_sgn(to_ort: Wrap) -> None:
    eager = Small()
    ort = to_ort(eager)
    x = torch.randn(3, 4)
    for model in (eager, ort):
        (model(x) ** 2).sum().backward()
    torch.testing.assert_close(ort.weight.grad, eager.weight.grad, rtol=5e-3, atol=5e-3)
    assert session.is_active(ort)


def test_a_sparse_embedding_has_a_dense_gradient(to_ort: Wrap) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sin()

    eager = Net()
    ort = to_ort(eager)
    ids = torch.tensor([[0, 2, 2], [4, 0, 1]])
    for model in (eager, ort):
        model(ids).square().sum().backward()
    torch.testing.assert_close(ort.table.weight.grad, eager.table.weight.grad.to_dense())
