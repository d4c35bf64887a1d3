"""RMSNorm, SwiGLU and GELU as one node each: eager's numbers, and no node where the chain is another one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig
from ortlaunch.ort import session
from tests.ort.conftest import operators

RMS_NORM, SILU_PRODUCT = "ortlaunch::rms_norm", "ortlaunch::silu_product"
NAMES = ["rms_norm", "silu_product", "gelu", "sigmoid", "silu"]
OF_ONE = {"gelu": functional.gelu, "sigmoid": torch.sigmoid, "silu": functional.silu}
SHAPES = [(3, 5), (2, 3, 16), (1, 1), (7, 50), (300, 130)]


class Written(nn.Module):
    """RMSNorm, written out as in transformers or in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(12, 12)
        self.weight = nn.Parameter(torch.rand(12) + 0.5)
        self.own = nn.RMSNorm(12, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        match self.kind:
            case "torch":
                return self.own(x)
            case "other values":
                variance = (2 * x).pow(2).mean(-1, keepdim=True)
            case "other axis":
                variance = x.pow(2).mean(1, keepdim=True)
            case "cubes":
                variance = x.abs().pow(3).mean(-1, keepdim=True)
            case "sum":
                variance = x.pow(2).sum(-1, keepdim=True)
            case _:
                variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        root = torch.rsqrt(variance + 1e-5)
        match self.kind:
            case "swapped":
                return (root * x) * self.weight
            case "number":
                return 2.0 * (x * root)
            case "root":
                return self.weight * (x * torch.sqrt(variance + 1e-5))
        return self.weight * (x * root).to(x.dtype)


class Gated(nn.Module):
    """SwiGLU, or another product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up = nn.Linear(12, 10), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        match self.kind:
            case "swapped":
                return up * functional.silu(gate)
            case "by hand":
                return gate * torch.sigmoid(gate) * up
            case "other gate":
                return (up * torch.sigmoid(gate)) * up
            case "one row":
                return functional.silu(gate[:, :1]) * up
            case "number":
                return functional.silu(gate) * 3.0
            case "vector":
                return functional.silu(gate) * up[0, 0]
        return functional.silu(gate) * up


def wrapped(model: nn.Module, folder: Path) -> nn.Module:
    cfg = OrtConfig(debug=OrtDebugConfig(save_onnx=True))
    return session.wrap(copy.deepcopy(model), cfg, threads=2, onnx_dir=folder)


def assert_same(model: nn.Module, ort: nn.Module) -> None:
    exact = copy.deepcopy(model).double()
    for rows, length in ((2, 5), (3, 9), (1, 1)):
        x = torch.randn(rows, length, 12)
        weights = torch.randn(rows, length, 12)
        for each, given in ((model, x), (ort, x), (exact, x.double())):
            each.zero_grad()
            out = each(given)
            (out * weights[..., : out.shape[-1]]).sum().backward()
        torch.testing.assert_close(ort(x), model(x), rtol=1e-6, atol=1e-6)
        for name, parameter in model.named_parameters():
            mine = ort.get_parameter(name).grad
            assert (mine is None) == (parameter.grad is None), name
            if mine is not None:
                error = float((mine - parameter.grad).abs().max())
                # The root of a value near zero makes rounding large, in eager as well.
                rounding = float((parameter.grad - exact.get_parameter(name).grad).abs().max())
                assert error <= max(1e-5 * max(1.0, float(parameter.grad.abs().max())), 4 * rounding), name
    assert session.is_active(ort)


@pytest.mark.parametrize(
    ("made", "kind", "operator", "is_found"),
    [
        *[(Written, kind, RMS_NORM, True) for kind in ("transformers", "swapped", "torch")],
        *[(Written, kind, RMS_NORM, False) for kind in ("other values", "other axis", "cubes", "sum")],
        *[(Written, kind, RMS_NORM, False) for kind in ("number", "root")],
        *[(Gated, kind, SILU_PRODUCT, True) for kind in ("silu", "swapped", "by hand", "one row")],
        *[(Gated, kind, SILU_PRODUCT, False) for kind in ("other gate", "number", "vector")],
    ],
)
def test_what_is_such_a_chain_is_one_node(
    made: Callable[[str], nn.Module], kind: str, operator: str, is_found: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = made(kind)
    ort = wrapped(model, tmp_path)
    assert_same(model, ort)
    found = operators(tmp_path)
    assert (operator in found) == is_found
    # Nothing of the chain is left over.
    assert not is_found or not found & {"ReduceMean", "Pow", "Sqrt", "ortlaunch::sigmoid", "ortlaunch::silu"}


@pytest.mark.parametrize("frozen", [["weight"], ["first.weight", "first.bias"]])
def test_a_frozen_part_leaves_the_gradients_of_the_others(frozen: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Written("transformers")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    assert_same(model, wrapped(model, tmp_path))


def test_a_value_that_is_also_used_elsewhere_keeps_its_own_gradient(tmp_path: Path) -> None:
    class Both(Gated):
        def forward(self, x: Tensor) -> Tensor:
            gate = functional.silu(self.gate(x))
            return gate * self.up(x) + gate

    torch.manual_seed(0)
    model = Both("silu")
    assert_same(model, wrapped(model, tmp_path))


def by_definition(name: str, *inputs: Tensor) -> Tensor:
    if name == "rms_norm":
        weight, x = inputs
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
    if name in OF_ONE:
        return OF_ONE[name](inputs[0])
    gate, x = inputs
    return functional.silu(gate) * x


def by_kernel(name: str, grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Returns the result and the gradients of all inputs."""
    if name in OF_ONE:
        out = getattr(torch.ops.ortlaunch, name)(*inputs)
        backward = getattr(torch.ops.ortlaunch, f"{name}_backward")
        return [out, backward(grad, out if name == "sigmoid" else inputs[0])]
    if name == "rms_norm":
        out, scale = torch.ops.ortlaunch.rms_norm(*inputs, 1e-6)
        return [out, *torch.ops.ortlaunch.rms_norm_backward(grad, *inputs, scale)]
    return [torch.ops.ortlaunch.silu_product(*inputs), *torch.ops.ortlaunch.silu_product_backward(grad, *inputs)]


def exact(compute: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Returns the same in fp64 by autograd."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def drawn(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    if name in OF_ONE:
        return [torch.randn(shape), 3 * torch.randn(shape)]
    first = torch.rand(shape[-1:]) + 0.5 if name == "rms_norm" else 4 * torch.randn(shape)
    return [torch.randn(shape), first, torch.randn(shape)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_as_near_to_fp64_as_torchs_operators(name: str, shape: tuple[int, ...], threads: int) -> None:
    session.import_ortmodule()
    session.extension.load_kernels()
    torch.manual_seed(0)
    grad, *inputs = drawn(name, shape)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = by_kernel(name, grad, *inputs)
    finally:
        torch.set_num_threads(before)
    for mine, right in zip(found, exact(lambda *x: by_definition(name, *x), grad, *inputs), strict=True):
        assert float((mine - right).abs().max()) <= 4e-6 * max(1.0, float(right.abs().max()))
        double = by_kernel(name, grad.double(), *(x.double() for x in inputs))
    for mine, right in zip(double, exact(lambda *x: by_definition(name, *x), grad, *inputs), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_in_its_row(name: str, value: float) -> None:
    session.import_ortmodule()
    session.extension.load_kernels()
    torch.manual_seed(0)
    for place in range(len(drawn(name, (1, 1)))):
        values = drawn(name, (4, 37))
        values[place].view(-1)[5] = value
        grad, *inputs = values
        for index, (mine, right) in enumerate(
            zip(
                by_kernel(name, grad, *inputs),
                exact(lambda *x: by_definition(name, *x), grad, *inputs),
                strict=True,
            )
        ):
            # Where torch has an infinity or NaN, so has the kernel, if perhaps the other one; nowhere else.
            assert torch.equal(mine.isfinite(), right.isfinite()), (place, index)


def test_sigmoid_keeps_its_digits() -> None:
    """Down to where it is a denormal number."""
    session.import_ortmodule()
    session.extension.load_kernels()
    x = torch.linspace(-86, 20, 4001)
    torch.testing.assert_close(torch.ops.ortlaunch.sigmoid(x), torch.sigmoid(x.double()).float(), rtol=1e-5, atol=0.0)
    far = torch.tensor([-95.0])
    torch.testing.assert_close(torch.ops.ortlaunch.sigmoid(far).log(), far, rtol=1e-4, atol=0.0)


def test_activations_far_from_zero() -> None:
    session.import_ortmodule()
    session.extension.load_kernels()
    far = torch.tensor(
        [-3e38, -1e30, -1e4, -100.0, -88.5, -87.0, -60.0, -20.0, -5.8, -5.5, 0.0, 5.5, 5.8, 20.0, 88.0, 1e4]
    )
    for name, others in (("silu_product", [torch.full_like(far, 2.0)]), ("gelu", []), ("silu", []), ("sigmoid", [])):
        grad = torch.ones_like(far)
        found = by_kernel(name, grad, far, *others)
        expected = exact(lambda *x, name=name: by_definition(name, *x), grad, far, *others)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right.float(), rtol=2e-6, atol=4e-7)


def test_gelu_everywhere() -> None:
    """No worse than torch's own over the range in which it is not zero or the identity."""
    session.import_ortmodule()
    session.extension.load_kernels()
    x = torch.linspace(-7, 7, 200_003)
    grad = torch.ones_like(x)
    found = by_kernel("gelu", grad, x)
    leaf = x.clone().requires_grad_()
    by_torch = functional.gelu(leaf)
    torchs = [by_torch.detach(), *torch.autograd.grad(by_torch, leaf, grad)]
    for mine, its, right in zip(found, torchs, exact(functional.gelu, grad, x), strict=True):
        assert float((mine - right).abs().max()) <= 1.5 * float((its - right).abs().max()) + 1e-7
