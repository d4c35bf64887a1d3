"""A model whose blocks run on ONNX Runtime one by one computes what the plain model computes, dropout included.

Here without DeepSpeed, so that each property is seen alone; tests/integration/test_zero3.py has both together.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Fallback, ModelConfig, OrtConfig, OrtDebugConfig, OrtZero3
from ortlaunch.models import modes
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.ort import session
from ortlaunch.ort.module import cache
from ortlaunch.ort.module.python_values import described
from ortlaunch.ort.verify.blocks import block_findings

WHOSE_MASKS = pytest.mark.parametrize("torch_kernels", [True, False], ids=["torch", "onnxruntime"])
"""Whose kernel, and so whose generator, draws dropout's masks; on CUDA always ONNX Runtime's."""
BOTH = pytest.mark.parametrize("zero3", list(OrtZero3))


class Stack(nn.Module):
    """Blocks one after the other, each given what the forward is given."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


class Scale(nn.Module):
    """Weight by weight, with dropout: homogeneous in the weight, so that weight x gradient is the output's sum."""

    def __init__(self, width: int = 512, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.weight * x)


def wrapped(model: nn.Module, tmp_path: Path, **options: Any) -> nn.Module:
    return session.wrap_blocks(model, OrtConfig(**options), threads=2, onnx_dir=tmp_path / "onnx")


@BOTH
def test_a_transformer_has_eagers_loss_gradients_and_names(tmp_path: Path, zero3: OrtZero3) -> None:
    torch.manual_seed(0)
    params = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_layer": 2}
    eager = build_model(ModelConfig(name="gpt2_nano", params=params))
    ort = wrapped(copy.deepcopy(eager), tmp_path, zero3=zero3)
    for batch, length in ((3, 32), (2, 48)):
        ids = torch.randint(0, 256, (batch, length))
        for model in (eager, ort):
            model.zero_grad()
        expected, actual = eager(input_ids=ids, labels=ids).loss, ort(input_ids=ids, labels=ids).loss
        expected.backward()
        actual.backward()
        assert actual.item() == pytest.approx(expected.item(), abs=1e-5)
        of_ort = dict(ort.named_parameters())
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(of_ort[name].grad, parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert list(ort.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in ort.named_modules()] == [name for name, _ in eager.named_modules()]
    assert session.is_active(ort)
    assert session.fallback_reason(ort) is None


def test_blocks_whose_graphs_are_kept_return_what_they_return_in_pytorch(tmp_path: Path) -> None:
    origins = []
    for _ in range(2):
        model = wrapped(build_model(ModelConfig(name="gpt2_nano", params={"n_layer": 2})), tmp_path)
        ids = torch.zeros((1, 8), dtype=torch.long)
        with cache.reading():
            model(input_ids=ids, labels=ids).loss.backward()
        origins += session.export_origins(model)
    assert origins[0] == "stored"
    assert set(origins[2:]) == {"hit"}


@BOTH
@WHOSE_MASKS
def test_gradients_are_those_of_the_masks_that_the_loss_saw(
    tmp_path: Path, zero3: OrtZero3, torch_kernels: bool
) -> None:
    """With other masks in the second forward, weight x gradient would be another sum than the loss."""
    stack = Stack(Scale(dropout=0.5), Scale(dropout=0.5), Scale(dropout=0.5))
    model = wrapped(stack, tmp_path, zero3=zero3, torch_kernels=torch_kernels)
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.ones(4, 512)).sum()
        loss.backward()
        for block in model.blocks:
            torch.testing.assert_close((block.weight * block.weight.grad).sum(), loss)
        seen.append(loss.item())
    assert len(set(seen)) == 3, "the masks differ from step to step"
    assert all(abs(value - 4 * 512) > 1e-3 for value in seen), "dropout is on"


@WHOSE_MASKS
def test_masks_follow_torchs_generator_and_blocks_have_masks_of_their_own(tmp_path: Path, torch_kernels: bool) -> None:
    model = wrapped(Stack(Scale(dropout=0.5), Scale(dropout=0.5)), tmp_path, torch_kernels=torch_kernels)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = model(torch.ones(1, 512)).detach()
    torch.set_rng_state(state)
    assert torch.equal(model(torch.ones(1, 512)), first)
    # One mask twice would leave half of the values, two masks leave a quarter.
    assert 0.15 < (first != 0).float().mean() < 0.35


def test_dropout_is_off_in_evaluation_and_on_again_after_it(tmp_path: Path) -> None:
    model = wrapped(Stack(Scale(dropout=0.5), Scale(dropout=0.5)), tmp_path)
    x = torch.ones(2, 512)
    expected = model.blocks[0].weight * model.blocks[1].weight * x
    assert (model(x) == 0).any()
    model.eval()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), expected)
    model.train()
    assert (model(x) == 0).any()


def test_a_part_that_is_kept_in_evaluation_mode_stays_so_after_an_evaluation(tmp_path: Path) -> None:
    model = wrapped(Stack(Scale(dropout=0.5), Scale(dropout=0.5)), tmp_path)
    for block in model.blocks:
        block.dropout.eval()
    x = torch.ones(2, 512)
    expected = model.blocks[0].weight * model.blocks[1].weight * x
    torch.testing.assert_close(model(x), expected)
    with modes.kept(model):
        model.eval()
        with torch.no_grad():
            model(x)
    torch.testing.assert_close(model(x), expected)


def test_a_block_that_is_kept_in_evaluation_mode_is_refused(tmp_path: Path) -> None:
    model = wrapped(Stack(Scale(), Scale()), tmp_path)
    task = make_task(model, {"x": torch.ones(2, 512)})
    model.blocks[1].eval()
    with pytest.raises(RequestError, match=r"the block blocks\.1 is kept in evaluation mode"):
        block_findings(model, task, contextlib.nullcontext, [])
    model.requires_grad_(False)
    assert block_findings(model, task, contextlib.nullcontext, []) == []


class Talkative(nn.Module):
    """Takes and returns what transformers' blocks do: tuples, None, flags, dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        positions: tuple[Tensor, Tensor],
        negate: bool = False,
        cache: object | None = None,
    ) -> dict[str, Any]:
        out = self.weight * x * positions[0] + positions[1]
        if mask is not None:
            out = out.masked_fill(mask, 0.0)
        return {"hidden": (-out if negate else out,), "cache": cache, "count": 2}


@BOTH
def test_arguments_and_outputs_of_any_structure_pass(tmp_path: Path, zero3: OrtZero3) -> None:
    eager = Stack(Talkative(), Talkative())
    ort = wrapped(copy.deepcopy(eager), tmp_path, zero3=zero3)
    x, positions = torch.rand(3, 8), (torch.rand(8, requires_grad=True), torch.rand(8))
    calls: list[dict[str, Any]] = [{}, {"mask": torch.rand(3, 8) > 0.5}, {"negate": True}, {}]
    for call in calls:
        expected, actual = (model.blocks[0](x, positions=positions, **call) for model in (eager, ort))
        assert actual["cache"] is None
        assert actual["count"] == 2
        torch.testing.assert_close(actual["hidden"][0], expected["hidden"][0])
        inputs = [positions[0]]
        for outputs in (expected, actual):
            positions[0].grad = None
            outputs["hidden"][0].square().sum().backward()
            inputs.append(positions[0].grad)
        torch.testing.assert_close(inputs[1], inputs[2])
    # One export for each structure, and none for the call that came back.
    assert len(ort.blocks[0].forward.ort_modules) == 3


def test_a_cache_as_argument_is_refused_by_name(tmp_path: Path) -> None:
    class DynamicCache:
        pass

    model = wrapped(Stack(Talkative(), Talkative()), tmp_path)
    with pytest.raises(RequestError, match=r"blocks\.0 .*DynamicCache.*use_cache=False"):
        model.blocks[0](torch.rand(3, 8), positions=(torch.rand(8), torch.rand(8)), cache=DynamicCache())


def test_a_number_that_changes_with_every_call_is_refused(tmp_path: Path) -> None:
    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, factor: int) -> Tensor:
            return self.weight * x * factor

    model = wrapped(Stack(Times(), Times()), tmp_path)
    for factor in range(8):
        torch.testing.assert_close(model.blocks[0](torch.ones(4), factor), torch.full((4,), float(factor)))
    with pytest.raises(RequestError, match=r"blocks\.0 .*as a tensor"):
        model.blocks[0](torch.ones(4), 8)


@BOTH
def test_a_first_block_whose_input_needs_no_gradient_is_trained(tmp_path: Path, zero3: OrtZero3) -> None:
    model = wrapped(Stack(Scale(), Scale()), tmp_path, zero3=zero3)
    model(torch.ones(2, 512)).sum().backward()
    assert model.blocks[0].weight.grad is not None
    torch.testing.assert_close(model.blocks[0].weight.grad, 2 * model.blocks[1].weight.detach())


def test_a_trained_block_without_a_floating_point_input_is_refused(tmp_path: Path) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    model = wrapped(Stack(Embed(), Embed()), tmp_path)
    with pytest.raises(RequestError, match=r"blocks\.0 .*backend\.blocks"):
        model.blocks[0](torch.tensor([1, 2]))


@BOTH
def test_frozen_blocks_pass_gradients_on(tmp_path: Path, zero3: OrtZero3) -> None:
    model = wrapped(Stack(Scale(), Scale(), Scale()), tmp_path, zero3=zero3)
    for index in (0, 2):
        model.blocks[index].requires_grad_(False)
    model(torch.ones(2, 512)).sum().backward()
    assert model.blocks[0].weight.grad is None
    expected = 2 * model.blocks[0].weight * model.blocks[2].weight
    torch.testing.assert_close(model.blocks[1].weight.grad, expected.detach())


def test_active_means_every_block(tmp_path: Path) -> None:
    model = wrapped(Stack(Scale(), Scale()), tmp_path)
    assert not session.is_active(model)
    assert session.export_seconds(model) is None
    model.blocks[0](torch.ones(2, 512)).sum().backward()
    one = session.export_seconds(model)
    assert not session.is_active(model)
    model(torch.ones(2, 512)).sum().backward()
    assert session.is_active(model)
    assert 0 < one < session.export_seconds(model) < 120


class Modulus(nn.Module):
    """Uses an operator that the exporter does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.weight * x, x).abs()


def test_an_unsupported_operator_in_a_block_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="aten::complex"):
        wrapped(Stack(Modulus(), Modulus()), tmp_path)(torch.rand(2, 8))


@BOTH
def test_with_warn_a_block_falls_back_and_says_which(tmp_path: Path, zero3: OrtZero3) -> None:
    eager = Stack(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(Modulus()))
    ort = wrapped(copy.deepcopy(eager), tmp_path, fallback=Fallback.warn, zero3=zero3)
    x = torch.rand(2, 8)
    for model in (eager, ort):
        model(x).sum().backward()
    for expected, actual in zip(eager.parameters(), ort.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
    assert not session.is_active(ort)
    assert session.fallback_reason(ort).startswith("blocks.1: ")


@BOTH
def test_a_buffer_moves_once_in_a_block_that_has_fallen_back(tmp_path: Path, zero3: OrtZero3) -> None:
    model = Stack(nn.Sequential(Counted()), nn.Sequential(Modulus(), Counted()))
    ort = wrapped(model, tmp_path, fallback=Fallback.warn, zero3=zero3)
    for _ in range(2):
        ort(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert [block.calls.item() for block in (ort.blocks[0][0], ort.blocks[1][1])] == [2, 2]
    assert session.fallback_reason(ort).startswith("blocks.1: ")


def test_what_forward_reaches_ends_before_ortmodules_own_objects(tmp_path: Path) -> None:
    """What these reach changes by itself, and a run whose model reaches a value that changes is refused."""
    ort = wrapped(Stack(Scale(), Scale()), tmp_path)
    ort(torch.ones(2, 512)).sum().backward()
    reached = described(ort)["reached"]
    assert any(name.endswith("Stack.forward") for name in reached)
    assert not [name for name in reached if name.startswith("onnx")]


def test_save_onnx_tells_the_blocks_apart(tmp_path: Path) -> None:
    debug = OrtDebugConfig(save_onnx=True, onnx_prefix="net")
    wrapped(Stack(Scale(), Scale()), tmp_path, debug=debug)(torch.ones(2, 512)).sum().backward()
    names = {path.name for path in (tmp_path / "onnx").iterdir()}
    for block in ("blocks.0", "blocks.1"):
        assert any(name.startswith(f"net_{block}_torch_exported") for name in names)


def test_no_session_of_a_block_keeps_an_arena(tmp_path: Path) -> None:
    """Each would keep the most that its block ever needed; a whole model's one session still has its arena."""
    model = wrapped(Stack(Scale(), Scale()), tmp_path)
    model(torch.ones(2, 512))
    for block in model.blocks:
        manager = block.forward.ort_modules[0]._torch_module._execution_manager(True)
        options = manager._execution_agent._inference_session.get_session_options()
        assert not options.enable_cpu_mem_arena
    whole = session.wrap(Scale(), OrtConfig(), threads=2, onnx_dir=tmp_path)
    whole(torch.ones(2, 512))
    agent = whole._torch_module._execution_manager(True)._execution_agent
    assert agent._inference_session.get_session_options().enable_cpu_mem_arena


def test_close_ends_every_session(tmp_path: Path) -> None:
    model = wrapped(Stack(Scale(), Scale()), tmp_path)
    model(torch.ones(2, 512)).sum().backward()
    managers = [block.forward.ort_modules[0]._torch_module._execution_manager(True) for block in model.blocks]
    sessions = [weakref.ref(manager._execution_agent) for manager in managers]
    assert all(open_one() is not None for open_one in sessions)
    session.close(model)
    assert all(ended() is None for ended in sessions)
    assert not session.is_active(model)


class Counted(Scale):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


@BOTH
def test_a_buffer_that_a_block_changes_moves_once(tmp_path: Path, zero3: OrtZero3) -> None:
    ort = wrapped(Stack(Counted(), Counted()), tmp_path, zero3=zero3)
    for _ in range(2):
        ort(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert [block.calls.item() for block in ort.blocks] == [2, 2]


class Averaged(nn.Module):
    """Multiplies by the number of its forward, so that its gradients belong to the buffer before it has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.linear(x)) * self.calls


@BOTH
def test_running_statistics_and_gradients_are_eagers(tmp_path: Path, zero3: OrtZero3) -> None:
    torch.manual_seed(0)
    eager = Stack(Averaged(), Averaged())
    ort = wrapped(copy.deepcopy(eager), tmp_path, zero3=zero3)
    batches, weights = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1))
    for x, weight in zip(batches, weights, strict=True):
        for model in (eager, ort):
            model.train().zero_grad()
            (model(x.clone().requires_grad_()) * weight).sum().backward()
        for (name, expected), actual in zip(eager.named_parameters(), ort.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, atol=1e-3, rtol=1e-4, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(ort.eval()(x), eager.eval()(x))
        for (name, expected), actual in zip(eager.named_buffers(), ort.named_buffers(), strict=True):
            torch.testing.assert_close(actual[1], expected, msg=name)
    assert [block.calls.item() for block in ort.blocks] == [6, 6]
    assert session.is_active(ort)
