"""PyTorch's kernels and ours in ONNX Runtime's graph: eager's numbers, whatever is frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ortlaunch.config.schema import ModelConfig, OrtConfig, OrtDebugConfig
from ortlaunch.models.registry import build_model
from ortlaunch.ort import session
from tests.ort.conftest import operators


class Net(torch.nn.Module):
    """One operator behind a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(16, 16)
        self.norm = torch.nn.LayerNorm(16, elementwise_affine=kind != "plain_norm")
        self.last = torch.nn.Linear(16, 8, bias=False)
        self.conv = Conv1D(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        match self.kind:
            case "linear":
                return self.last(hidden)
            case "conv1d":
                return self.conv(hidden)
            case "norm" | "plain_norm":
                return self.norm(hidden)
            case "gelu":
                return functional.gelu(hidden)
            case "gelu_tanh":
                return functional.gelu(hidden, approximate="tanh")
            case "cross_entropy":
                labels = (x[..., 0].abs() * 5).long().clamp(0, 15).masked_fill(x[..., 1] > 1, -100)
                return functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())
        heads = hidden.view(*x.shape[:2], 2, 8).transpose(1, 2)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = {"bool_mask": causal, "float_mask": causal.float().log()}.get(self.kind)
        return functional.scaled_dot_product_attention(
            heads,
            heads * 2,
            heads + 1,
            attn_mask=mask,
            is_causal=self.kind == "causal",
            scale=0.3 if self.kind == "scale" else None,
        )


KINDS = [
    *("linear", "conv1d", "norm", "plain_norm", "gelu", "gelu_tanh", "cross_entropy"),
    *("attention", "causal", "bool_mask", "float_mask", "scale"),
]


def wrapped(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    return session.wrap(model, OrtConfig(**options), threads=2, onnx_dir=Path("unused"))


def assert_same_step(eager: torch.nn.Module, ort: torch.nn.Module, x: torch.Tensor, seed: int = 5) -> None:
    torch.manual_seed(seed)
    actual = ort(x)
    torch.manual_seed(seed)
    expected = eager(x)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    direction = torch.randn_like(expected)
    actual.backward(direction)
    expected.backward(direction)
    for (name, mine), theirs in zip(ort.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_has_eagers_outputs_and_gradients(kind: str) -> None:
    torch.manual_seed(0)
    eager = Net(kind)
    ort = wrapped(copy.deepcopy(eager))
    for length in (5, 7):
        eager.zero_grad()
        ort.zero_grad()
        assert_same_step(eager, ort, torch.randn(3, length, 16))
    assert session.is_active(ort)


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("linear", ["first.weight"]),
        ("linear", ["first.bias"]),
        ("linear", ["first.weight", "first.bias"]),
        ("linear", ["last.weight"]),
        ("conv1d", ["conv.bias"]),
        ("conv1d", ["conv.weight"]),
        ("conv1d", ["conv.bias", "conv.weight"]),
        ("norm", ["norm.weight", "norm.bias"]),
    ],
)
def test_frozen_parameters_do_not_cut_off_the_gradients_of_others(kind: str, frozen: list[str]) -> None:
    torch.manual_seed(0)
    eager = Net(kind)
    for name in frozen:
        eager.get_parameter(name).requires_grad_(False)
    assert_same_step(eager, wrapped(copy.deepcopy(eager)), torch.randn(3, 5, 16))


def test_all_gradients_of_a_linear_layer_come_from_one_node(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4, bias=False)]
    eager = torch.nn.Sequential(*layers)
    cfg = OrtConfig(debug=OrtDebugConfig(save_onnx=True))
    ort = session.wrap(copy.deepcopy(eager), cfg, threads=1, onnx_dir=tmp_path)
    assert_same_step(eager, ort, torch.randn(2, 5, 16))
    found = operators(tmp_path)
    assert found >= {"ortlaunch::linear_trained_backward", "ortlaunch::linear_bias_trained_backward"}
    # The first layer's input needs no gradient.
    assert "ortlaunch::linear_grad_weight" in found
    assert "ortlaunch::linear_grad_x" not in found


def test_an_input_that_wants_a_gradient_gets_it() -> None:
    eager = Net("linear")
    ort = wrapped(copy.deepcopy(eager))
    x = torch.randn(2, 5, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ort(x).square().sum().backward()
    eager(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_gpt2_trains_to_eagers_losses() -> None:
    losses = {}
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = build_model(ModelConfig(name="gpt2_nano", params=still))
    batches = [torch.randint(0, 256, size) for size in ((2, 48), (2, 48), (3, 70), (1, 130), (2, 48))]
    for name, candidate in (("eager", copy.deepcopy(model)), ("ort", wrapped(copy.deepcopy(model)))):
        optimizer = torch.optim.AdamW(candidate.parameters(), lr=1e-3)
        losses[name] = []
        for ids in batches:
            loss = candidate(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["ort"] == pytest.approx(losses["eager"], abs=2e-4)


def operators_of(folder: Path) -> set[str]:
    (path,) = folder.glob("*torch_exported_training.onnx")
    return {node.op_type for node in onnx.load(str(path)).graph.node}


def test_they_can_be_switched_off_and_on_again(tmp_path: Path) -> None:
    found = []
    for number, on in enumerate((True, False, True)):
        folder = tmp_path / str(number)
        cfg = OrtConfig(torch_kernels=on, debug=OrtDebugConfig(save_onnx=True))
        model = session.wrap(Net("norm"), cfg, threads=1, onnx_dir=folder)
        model(torch.rand(2, 5, 16)).sum().backward()
        found.append(operators_of(folder))
    assert "ATen" in found[0]
    assert "LayerNormalization" in found[1]
    assert "ATen" not in found[1]
    assert found[2] == found[0]


def test_without_them_dropout_is_onnx_runtimes() -> None:
    ort = wrapped(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.3)), torch_kernels=False)
    x = torch.rand(2, 5, 16)
    assert not torch.equal(ort(x), ort(x))
    ort.eval()
    assert torch.equal(ort(x), ort(x))


class Sum(torch.nn.Module):
    """``addmm`` or ``linear`` with a bias of some shape."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.before, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
        self.weight = torch.nn.Parameter(torch.randn(4, 5))
        shapes = {
            "vector": (5,),
            "matrix": (3, 5),
            "row": (1, 5),
            "column": (3, 1),
            "number": (1,),
            "linear_number": (1,),
        }
        self.bias = torch.nn.Parameter(torch.randn(shapes.get(kind, (5,))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.before(x)
        match self.kind:
            case "activation":
                return torch.addmm(self.other(x), values, self.weight)
            case "scaled":
                return torch.addmm(self.other(x), values, self.weight, beta=0.5, alpha=2.0)
            case "vector of activations":
                return torch.addmm(self.other(x).sum(0), values, self.weight)
            case "in place":
                return self.other(x).addmm_(values, self.weight)
            case "linear_number":
                return functional.linear(values, self.weight.t(), self.bias)
        return torch.addmm(self.bias, values, self.weight)


SUMS = ["activation", "scaled", "vector of activations", "in place", "linear_number"]
SUMS += ["vector", "matrix", "row", "column", "number"]


@pytest.mark.parametrize("kind", SUMS)
def test_a_bias_may_have_any_shape_and_be_computed(assert_parity: Any, kind: str) -> None:
    torch.manual_seed(0)
    assert_parity(Sum(kind), {"x": torch.randn(3, 4)}, {"x": torch.randn(3, 4)}, tolerance=5e-6)


class Cell(torch.nn.Module):
    """Three steps of a recurrent cell, over the batch's columns."""

    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell, self.last = cell, torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(x.shape[0], 6)
        state = (zeros, zeros) if isinstance(self.cell, torch.nn.LSTMCell) else zeros
        for column in range(3):
            state = self.cell(x[:, column], state)
        return self.last(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_recurrent_cells(assert_parity: Any, kind: type[torch.nn.RNNCellBase], bias: bool) -> None:
    torch.manual_seed(0)
    model = Cell(kind(4, 6, bias=bias))
    assert_parity(model, {"x": torch.randn(2, 3, 4)}, {"x": torch.randn(5, 3, 4)}, tolerance=5e-6)


class Ignoring(torch.nn.Module):
    """Cross-entropy that ignores an index computed from a shape."""

    def __init__(self, ignored: str, **options: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.ignored, self.options = ignored, options

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x)
        index = {"classes": logits.size(-1), "columns": x.size(1), "rows": target.size(0)}[self.ignored]
        logits, target = logits.flatten(0, -2), target.flatten()
        return torch.nn.CrossEntropyLoss(ignore_index=index, **self.options)(logits, target)


@pytest.mark.parametrize("torch_kernels", [True, False], ids=["torch_kernels", "ort_kernels"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize(("ignored", "shape"), [("classes", (6, 8)), ("columns", (6, 8)), ("columns", (3, 5, 8))])
def test_cross_entropy_ignores_a_computed_index(
    assert_parity: Any, ignored: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 5, shape[:-1])
    target.view(-1)[:2] = shape[1] if ignored == "columns" else shape[-1]
    assert_parity(Ignoring(ignored, **options), {"x": torch.randn(shape), "target": target}, tolerance=5e-6)


def test_the_gradient_of_cross_entropy_keeps_its_digits_where_logits_are_large() -> None:
    session.import_ortmodule()
    session.extension.load_kernels()
    torch.manual_seed(0)
    # These numbers are exact in fp32.
    logits = (torch.randn(4, 19) * 4).round() / 4 + 1e5
    target = torch.tensor([3, 0, -100, 18])
    loss, levels, total = torch.ops.ortlaunch.cross_entropy(logits, target, -100)
    gradient = torch.ops.ortlaunch.cross_entropy_backward(torch.ones(()), logits, levels, total, target, -100)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact, target)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0.0)
    (right,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient, right.float(), rtol=1e-5, atol=1e-7)
