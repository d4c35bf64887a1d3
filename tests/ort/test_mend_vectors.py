"""Matrix products with vectors, and the sums with a product that the exporter lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Product(torch.nn.Module):
    """A function of the values behind a linear layer, and of weights."""

    def __init__(self, function: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 5)
        self.function = function
        self.weights = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), *self.weights)


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], tuple[int, ...]]] = {
    "matrix @ vector": (lambda x, w: x @ w, [(5,)], (4,)),
    "matrices @ vector": (lambda x, w: x @ w, [(5,)], (2, 3, 4)),
    "vector @ matrix": (lambda x, w: x @ w, [(5, 3)], ()),
    "vector @ matrices": (lambda x, w: w @ x, [(4,)], (3, 4)),
    "vector @ vector": (lambda x, w: x @ w, [(5,)], ()),
    "dot": (torch.dot, [(5,)], ()),
    "mv": (torch.mv, [(5,)], (4,)),
    "linear, vector as weight": (functional.linear, [(5,)], (3, 4)),
    "linear, vector twice": (functional.linear, [(5,)], ()),
    "linear of a vector": (functional.linear, [(3, 5), (3,)], ()),
    "addmv": (lambda x, b, w: torch.addmv(b, x, w), [(4,), (5,)], (4,)),
    "addmv, scaled": (lambda x, w: torch.addmv(x[:, 0], x, w, beta=0.3, alpha=2), [(5,)], (4,)),
    "addmv, number": (lambda x, b, w: torch.addmv(b, x, w, alpha=-1), [(1,), (5,)], (4,)),
    "addbmm": (lambda x, b, w: torch.addbmm(b, x, w), [(3, 2), (4, 5, 2)], (4, 3)),
    "addbmm, scaled": (lambda x, b, w: torch.addbmm(b, x, w, beta=0.5, alpha=3), [(2,), (4, 5, 2)], (4, 3)),
    "column of a product": (
        lambda x, w: torch.linalg.cross((w @ x[:, :3, None])[..., 0], x[:, 2:]),
        [(4, 3, 3)],
        (4,),
    ),
    "addr": (lambda x, b, w: torch.addr(x, b, w, beta=0.5), [(4,), (5,)], (4,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_vectors(assert_parity: Any, name: str) -> None:
    torch.manual_seed(0)
    function, shapes, rows = PRODUCTS[name]
    assert_parity(Product(function, shapes), *({"x": torch.randn(*rows, 6)} for _ in range(2)), tolerance=5e-6)


def test_values_times_zero_are_ignored_as_in_torch(to_ort: Any) -> None:
    ort = to_ort(Product(lambda x, w: torch.addmv(x[:, 0] / 0, x, w, beta=0), [(5,)]))
    assert torch.isfinite(ort(torch.randn(4, 6))).all()
