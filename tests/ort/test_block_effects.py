"""A block under ZeRO 3 leaves nothing but its outputs, and runs no Python: where a model needs more, it is refused.

Without DeepSpeed, as in `test_blocks`.
"""

from __future__ import annotations

import contextlib
import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import RequestError, WrongGradientsError
from ortlaunch.config.schema import Allow, OrtConfig, OrtZero3
from ortlaunch.models.task import make_task
from ortlaunch.ort import session
from ortlaunch.ort.module.python_values import changed, described
from ortlaunch.ort.verify.blocks import block_findings
from ortlaunch.ort.verify.trap import Finding
from ortlaunch.trainer.backend_run import OrtRun
from ortlaunch.trainer.workers import Workers

BESIDE = "beside its outputs"


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks one after the other, and their mean as the loss."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([self.block(index) for index in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x)).square().mean()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Auxiliary(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.size = x.square().mean()
            return super().forward(x)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * sum(block.size.detach() for block in self.blocks)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.blocks[1].linear.register_forward_hook(lambda _module, _args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) + sum(one.square().mean() for one in self.seen)


class Appends(Net):
    class block(Block):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(super().forward(x))
            return seen[-1]

    def body(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.blocks:
            x = block(x, seen)
        return x * len(seen)


class ChangesInput(Net):
    class block(Block):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.no_grad():
                total.add_(y)
            return y

    def body(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x).detach()
        for block in self.blocks:
            x = block(x, total)
        return x + total


class SecondCounts(Net):
    class block(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.index == 0:
                return super().forward(x)
            self.calls += 1
            return super().forward(x) * self.calls


class SecondBranches(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.index == 0 or x.mean() > 0 else -x


class OtherWayCounts(Net):
    """The first block is called in another way than the second."""

    class block(Block):
        calls = 0

        def forward(self, x: Tensor, counts: bool) -> Tensor:
            self.calls += counts
            return super().forward(x) * (1 + self.calls)

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x, False), True)


class Sized(Net):
    """A branch over a size."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 3 else 2 * x - torch.tanh(self.linear(x))


class CountsEvaluations(Net):
    class block(Block):
        evaluations = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            self.evaluations += 1
            return super().forward(x) * self.evaluations


class Factors(Net):
    """A block goes by a list."""

    class block(Block):
        def __init__(self, index: int = 0) -> None:
            super().__init__(index)
            self.factors = [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factors[0]


class EvaluationDecides(Factors):
    """Evaluation changes the list, and training reads it."""

    class block(Factors.block):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            self.factors[0] += 1
            return Block.forward(self, x)


class TrainDecides(Factors):
    """The model's ``train()`` changes the list of the second block when the third evaluation ends."""

    turns = 0

    def train(self, mode: bool = True) -> TrainDecides:
        super().train(mode)
        self.turns += mode
        if self.turns == 3:
            self.blocks[1].factors[0] = 2.0
        return self


class Lists(Net):
    """The model itself keeps a list that grows, and draws random numbers between its blocks."""

    class block(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.detach()
            return self.dropout(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.dropout = nn.Dropout(0.5)

    def body(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.mean()))
        return super().body(self.dropout(x) + torch.rand(8))


class Twice(Net):
    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class Parts(Net):
    def body(self, x: Tensor) -> Tensor:
        return self.blocks[1].linear(self.blocks[0].linear(x))


class WithoutGradients(Net):
    """The first block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        return self.blocks[1](x)


class Dropped(nn.Module):
    """Homogeneous in its weight, so that weight times gradient is the sum of the outputs for the same masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 512))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.weight * x)


def wrapped(net: nn.Module, folder: Path, zero3: OrtZero3 = OrtZero3.recompute) -> nn.Module:
    return session.wrap_blocks(net, OrtConfig(zero3=zero3), threads=1, onnx_dir=folder)


def batch(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8)}


def findings(model: nn.Module, *allow: Allow) -> list[Finding]:
    torch.manual_seed(0)
    batches = [batch() for _ in range(3)]
    accepted = (allow,) if allow else ()
    return block_findings(model, make_task(model, batches[0]), contextlib.nullcontext, batches, *accepted)


@pytest.mark.parametrize("zero3", list(OrtZero3))
@pytest.mark.parametrize("net", [Auxiliary, Hooked, Appends, ChangesInput])
def test_what_a_block_leaves_beside_its_outputs_is_found(tmp_path: Path, net: type[Net], zero3: OrtZero3) -> None:
    (found,) = findings(wrapped(net(), tmp_path, zero3))
    assert found.kind is Allow["python_state"]
    assert BESIDE in found.what


@pytest.mark.parametrize("net", [SecondCounts, SecondBranches, OtherWayCounts])
def test_not_only_the_first_block_of_a_class_is_compared(tmp_path: Path, net: type[Net]) -> None:
    found = findings(wrapped(net(), tmp_path))
    assert any("blocks.1" in one.what for one in found), found


def test_what_the_model_itself_keeps_and_draws_is_no_finding(tmp_path: Path) -> None:
    assert findings(wrapped(Lists(), tmp_path)) == []


def test_new_sizes_of_a_blocks_inputs_are_compared(tmp_path: Path) -> None:
    model = wrapped(Sized(), tmp_path)
    assert findings(model) == []
    model(**batch(5)).backward()
    with pytest.raises(RequestError, match=r"in the block blocks\.0, called with tensors of \(2, 8\).*frozen_branch"):
        model(**batch(2))


def test_an_accepted_branch_is_not_compared(tmp_path: Path) -> None:
    model = wrapped(Sized(), tmp_path)
    assert findings(model, Allow["frozen_branch"]) == []
    model(**batch(2)).backward()


def test_evaluations_of_a_block_are_compared(tmp_path: Path) -> None:
    model = wrapped(CountsEvaluations(), tmp_path)
    assert findings(model) == []
    model.eval()
    with (
        torch.no_grad(),
        pytest.raises(RequestError, match=r"in evaluation mode, in the block blocks\.0.*wrong_outputs"),
    ):
        model(**batch())


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(**batch())
    model.train()


@pytest.mark.parametrize(("net", "evaluations"), [(EvaluationDecides, 1), (TrainDecides, 3)])
def test_what_an_evaluation_changes_in_a_block_is_compared(tmp_path: Path, net: type[Net], evaluations: int) -> None:
    model = wrapped(net(), tmp_path)
    assert findings(model) == []
    for _ in range(evaluations - 1):
        evaluate(model)
        model(**batch()).backward()
    evaluate(model)
    index = 1 if net is TrainDecides else 0
    with pytest.raises(WrongGradientsError, match=rf"in the block blocks\.{index}, the outputs under ONNX Runtime"):
        model(**batch())


@pytest.mark.parametrize("allow", [[], [Allow["wrong_gradients"]]])
def test_a_run_compares_its_blocks_again(tmp_path: Path, allow: list[Allow]) -> None:
    model = wrapped(Factors(), tmp_path)
    engine = types.SimpleNamespace(
        inner=model, precision_context=contextlib.nullcontext, model_inputs=lambda inputs: inputs
    )
    workers = Workers(0, 1, torch.device("cpu"), 1)
    run = OrtRun(engine, OrtConfig(recheck_every=2, allow=allow), workers, tmp_path, None, blocks=True)  # type: ignore[arg-type]
    run.check(make_task(model, batch()), [batch() for _ in range(3)])
    model(**batch()).backward()
    model.blocks[1].factors[0] = 2.0
    assert not run.micro_batch_begins(1, 0, batch())
    model(**batch())
    assert run.micro_batch_begins(2, 0, batch()) is not bool(allow)
    with contextlib.nullcontext() if allow else pytest.raises(WrongGradientsError, match=r"in the block blocks\.1"):
        model(**batch())


def test_a_block_that_is_called_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"blocks\.0 is called 2 times in one forward"):
        findings(wrapped(Twice(), tmp_path))
    assert findings(wrapped(Twice().requires_grad_(False), tmp_path)) == []


def test_a_model_that_calls_none_of_its_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"calls none of its blocks \(blocks\.0"):
        findings(wrapped(Parts(), tmp_path))


def test_comparing_is_no_state_of_the_model(tmp_path: Path) -> None:
    """It would be found as a value that forward changes, and no export would be kept."""
    model = wrapped(Net(), tmp_path)
    torch.manual_seed(0)
    model(**batch())

    def facts() -> dict[str, Any]:
        return described(model)

    before = facts()
    assert findings(model) == []
    for rows in (5, 6):
        model(**batch(rows)).backward()
    assert not changed(before, facts())
    assert copy.deepcopy(model.blocks[0]) is not model.blocks[0]


def test_a_block_that_is_called_without_gradients_trains(tmp_path: Path) -> None:
    model = wrapped(WithoutGradients(), tmp_path)
    assert findings(model) == []
    model(**batch()).backward()
    assert session.is_active(model)
    assert model.blocks[1].linear.weight.grad is not None


def test_a_copy_of_a_block_runs_in_pytorch_in_fp64(tmp_path: Path) -> None:
    """Where fp32 differs, it decides who is right."""
    model = wrapped(Net(), tmp_path)
    model(**batch()).backward()
    plain = session.plain_model(model.blocks[0].forward.ort_modules[0])
    x = torch.randn(4, 8)
    (wide,) = copy.deepcopy(plain).double()(x.double())
    torch.testing.assert_close(wide.float(), plain(x)[0])


@pytest.mark.parametrize("zero3", list(OrtZero3))
def test_the_models_own_checkpoint_around_a_block_has_the_same_masks_in_both_passes(
    tmp_path: Path, zero3: OrtZero3
) -> None:
    model = wrapped(nn.ModuleList([Dropped(), Dropped()]), tmp_path, zero3)
    torch.manual_seed(0)
    output = checkpoint(model[0], torch.ones(4, 512, requires_grad=True), use_reentrant=True)
    assert (output == 0).any()
    output.sum().backward()
    torch.testing.assert_close((model[0].weight * model[0].weight.grad).sum(), output.sum())
