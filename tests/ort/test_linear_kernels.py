"""Kernels of linear layers and LayerNorm, each beside fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.ort import session

SHAPES = [(1, 1, 1), (3, 5, 7), (68, 64, 256), (1, 50, 3), (700, 33, 130), (0, 4, 3), (5, 0, 3), (5, 4, 0)]
"""Rows, numbers of each value, and numbers of each result."""
NAMES = ["linear", "linear_bias", "conv1d", "layer_norm"]
EPSILON = 1e-5


def drawn(name: str, rows: int, depth: int, width: int) -> list[Tensor]:
    """The gradient of the result, and the inputs as `by_definition` takes them."""
    if name == "layer_norm":
        return [torch.randn(rows, depth), torch.rand(depth) + 0.5, torch.randn(depth), 3 * torch.randn(rows, depth) + 2]
    x, weight, bias = torch.randn(rows, depth), torch.randn(width, depth), torch.randn(width)
    others = {"linear": [weight, x], "linear_bias": [weight, bias, x], "conv1d": [bias, x, weight.t().contiguous()]}
    return [torch.randn(rows, width), *others[name]]


def by_definition(name: str, *inputs: Tensor) -> Tensor:
    if name == "layer_norm":
        weight, bias, x = inputs
        return functional.layer_norm(x, weight.shape, weight, bias, EPSILON)
    if name == "conv1d":
        bias, x, weight = inputs
        return x @ weight + bias
    weight, *bias, x = inputs
    return functional.linear(x, weight, *bias)


def by_kernel(name: str, grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Returns the result and the gradients of all inputs."""
    ours = torch.ops.ortlaunch
    if name == "layer_norm":
        out, mean, deviation = ours.layer_norm(*inputs, EPSILON)
        return [out, *ours.layer_norm_backward(grad, *inputs, mean, deviation)]
    if name == "conv1d":
        bias, x, weight = inputs
        out = ours.conv1d(*inputs)
        together = ours.conv1d_trained_backward(grad, x, weight)
        alone = [ours.grad_bias(grad), ours.conv1d_grad_x(grad, weight), ours.conv1d_grad_weight(grad, x)]
        assert_alike(together, alone)
        return [out, *together]
    weight, *bias, x = inputs
    out = getattr(ours, name)(*inputs)
    together = getattr(ours, f"{name}_trained_backward")(grad, weight, x)
    alone = [ours.linear_grad_weight(grad, x), *(ours.grad_bias(grad) for _ in bias), ours.linear_grad_x(grad, weight)]
    assert_alike(together, alone)
    return [out, *together]


def assert_alike(together: Sequence[Tensor], alone: Sequence[Tensor]) -> None:
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def exact(compute: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Returns the same in fp64 by autograd."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def on_threads(threads: int, name: str, *inputs: Tensor) -> list[Tensor]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        return by_kernel(name, *inputs)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def kernels() -> None:
    session.import_ortmodule()
    session.extension.load_kernels()
    torch.manual_seed(0)


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for mine, right in zip(found, expected, strict=True):
        assert mine.shape == right.shape
        if right.numel():
            assert float((mine - right).abs().max()) <= tolerance * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_as_near_to_fp64_as_torchs_operators(name: str, shape: tuple[int, int, int], threads: int) -> None:
    if name == "layer_norm" and not shape[1]:
        pytest.skip("torch refuses a normalization of nothing")
    grad, *inputs = drawn(name, *shape)
    expected = exact(lambda *x: by_definition(name, *x), grad, *inputs)
    assert_near(on_threads(threads, name, grad, *inputs), expected, 4e-6)
    doubles = [x.double() for x in (grad, *inputs)]
    assert_near(on_threads(threads, name, *doubles), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["linear", "linear_bias", "conv1d"])
def test_leading_dimensions_are_rows(name: str, dtype: torch.dtype) -> None:
    values = [x.to(dtype) for x in drawn(name, 12, 5, 7)]
    place = 2 if name == "conv1d" else len(values) - 1
    expected = by_kernel(name, *values)
    grad, x = values[0].view(3, 2, 2, 7), values[place].view(3, 2, 2, 5)
    found = by_kernel(name, grad, *values[1:place], x, *values[place + 1 :])
    assert found[0].shape == (3, 2, 2, 7)
    assert_alike([one.reshape(other.shape) for one, other in zip(found, expected, strict=True)], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_goes_where_it_goes_in_torch(name: str, value: float) -> None:
    """Rows and columns are not multiples of a register's width."""
    for place in range(len(drawn(name, 1, 1, 1))):
        values = drawn(name, 6, 37, 21)
        values[place].view(-1)[5] = value
        grad, *inputs = values
        expected = exact(lambda *x: by_definition(name, *x), grad, *inputs)
        for index, (mine, right) in enumerate(zip(by_kernel(name, grad, *inputs), expected, strict=True)):
            assert torch.equal(mine.isfinite(), right.isfinite()), (place, index)


def test_more_dimensions_than_two() -> None:
    weight, bias, x, grad = torch.randn(5, 4), torch.randn(5), torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    for one in (x, x[0, 0]):
        torch.testing.assert_close(torch.ops.ortlaunch.linear(weight, one), functional.linear(one, weight))
        torch.testing.assert_close(
            torch.ops.ortlaunch.linear_bias(weight, bias, one), functional.linear(one, weight, bias)
        )
    torch.testing.assert_close(torch.ops.ortlaunch.grad_bias(grad), grad.sum((0, 1)))
    torch.testing.assert_close(torch.ops.ortlaunch.linear_grad_x(grad, weight), grad @ weight)
    scale, shift = torch.rand(3, 4), torch.rand(3, 4)
    found = torch.ops.ortlaunch.layer_norm(scale, shift, x, EPSILON)
    for mine, right in zip(found, torch.native_layer_norm(x, (3, 4), scale, shift, EPSILON), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4])
def test_layer_norm_of_values_far_from_zero(shift: float) -> None:
    """The mean has the rounding of a sum of a thousand numbers: at a shift of 100 the error is 1.9 times torch's."""
    x = torch.randn(64, 1000) + shift
    weight, bias = torch.ones(1000), torch.zeros(1000)
    right = functional.layer_norm(x.double(), (1000,), eps=EPSILON)
    its = functional.layer_norm(x, (1000,), eps=EPSILON)
    mine, _, _ = torch.ops.ortlaunch.layer_norm(weight, bias, x, EPSILON)
    assert float((mine - right).abs().max()) <= 2.5 * float((its - right).abs().max()) + 1e-6


def test_a_row_of_equal_values_has_no_deviation() -> None:
    out, _, deviation = torch.ops.ortlaunch.layer_norm(
        torch.ones(37), torch.zeros(37), torch.full((2, 37), 3.0), EPSILON
    )
    assert float(out.abs().max()) < 1e-3
    torch.testing.assert_close(deviation, torch.full((2, 1), EPSILON**-0.5), rtol=1e-5, atol=0.0)


def test_sizes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="weight"):
        torch.ops.ortlaunch.linear(torch.rand(3, 4), torch.rand(2, 5))
    with pytest.raises(RuntimeError, match="bias"):
        torch.ops.ortlaunch.linear_bias(torch.rand(3, 4), torch.rand(2), torch.rand(2, 4))
    with pytest.raises(RuntimeError, match="gradients"):
        torch.ops.ortlaunch.linear_grad_weight(torch.rand(3, 4), torch.rand(2, 5))
