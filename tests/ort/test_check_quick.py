"""The check at a run's start: what it finds on the first batches, and that it leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional, utils
from torch.nn.utils import parametrizations

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Allow, Fallback, OrtConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.refusal import cause
from ortlaunch.ort.verify.start import QuickCheck
from ortlaunch.ort.verify.trap import Finding
from ortlaunch.trainer.seeds import seed_everything


class Net(nn.Module):
    """Two layers with dropout between them, and a count in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 3)
        self.rate = 0.5
        self.calls = 0

    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = functional.dropout(self.first(x), self.rate, self.training)
        return self.last(self.between(hidden, x))


class Branching(Net):
    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            hidden = torch.tanh(hidden)
        return hidden


class Averaging(Net):
    """A buffer that moves where the trace does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        value = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        self.average.untyped_storage().copy_(value.untyped_storage())
        return hidden


class Moving(Averaging):
    """A buffer that moves where the trace sees it."""

    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden + self.average


class NotSaved(Moving):
    """A buffer that is not saved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16), persistent=False)

    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        super().between(hidden, x)
        return hidden


class Noisy(Net):
    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return hidden + torch.randn_like(hidden)


class Exotic(Net):
    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.hfft(hidden, hidden.shape[-1])


def batches(*signs: float) -> list[Batch]:
    torch.manual_seed(3)
    return [{"x": sign * torch.rand(4, 8), "labels": torch.randint(0, 3, (4,))} for sign in signs]


def wrap(model: nn.Module, cfg: OrtConfig | None = None) -> nn.Module:
    return session.wrap(model, cfg or OrtConfig(), threads=1, onnx_dir=Path("onnx"))


def findings(model: nn.Module, data: list[Batch], cfg: OrtConfig | None = None) -> list[Finding]:
    return QuickCheck(wrap(model, cfg), make_task(model, data[0]), contextlib.nullcontext).findings(data)


def test_nothing_is_found_in_a_sound_model_with_dropout() -> None:
    assert findings(Net(), batches(1, -1, 1)) == []


@pytest.mark.parametrize("torch_kernels", [True, False], ids=["torch kernels", "ort kernels"])
def test_a_frozen_branch_is_found_through_dropout_and_shown(torch_kernels: bool) -> None:
    (found,) = findings(Branching(), batches(1, 1, -1), OrtConfig(torch_kernels=torch_kernels))
    assert found.kind is Allow.frozen_branch
    message = found.refusal()
    assert "\n" not in message
    for part in ("`if x.mean() > 0:`", Path(__file__).name, "backend.allow=[frozen_branch]", "backend=eager"):
        assert part in message


def test_a_branch_that_the_data_never_takes_otherwise_passes() -> None:
    assert findings(Branching(), batches(1, 1, 1)) == []


def test_a_running_mean_that_is_zero_but_for_rounding_is_no_finding() -> None:
    class NormalizedTwice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(nn.BatchNorm1d(16), nn.BatchNorm1d(16))
            self.rate = 0.0

        def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.norms(hidden)

    assert findings(NormalizedTwice(), batches(1, 1, 1)) == []


def test_an_output_that_is_zero_but_for_rounding_is_no_finding() -> None:
    class WithItsMean(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            hidden = self.first(x)
            logits = self.last(hidden)
            normal = nn.functional.layer_norm(hidden, hidden.shape)
            return nn.functional.cross_entropy(logits, labels), logits, normal.mean()

    assert findings(WithItsMean(), batches(1, 1, 1)) == []


@pytest.mark.parametrize("make", [Moving, NotSaved])
def test_a_buffer_that_moves_is_no_finding(make: Callable[[], nn.Module]) -> None:
    assert findings(make(), batches(1, 1, 1)) == []


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, utils.spectral_norm], ids=["module", "hook"])
def test_spectral_norm_is_no_finding(norm: Callable[[nn.Module], nn.Module]) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = norm(self.first)

    assert findings(Normed(), batches(1, 1, 1)) == []


def test_a_buffer_that_stays_is_found_by_comparison() -> None:
    found = findings(Averaging(), batches(1, 1, 1))
    assert [one.kind for one in found] == [Allow.stale_buffers]
    assert "average" in found[0].refusal()
    assert "backend.allow=[stale_buffers]" in found[0].refusal()


class MendedFromOutside(nn.Module):
    """An ORTModule whose buffer is moved after the forward pass, as a mend would."""

    def __init__(self, wrapped: nn.Module, share: float) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.share = share

    def __getattr__(self, name: str):
        return super().__getattr__(name) if name == "wrapped" else getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, model = self.wrapped(x=x), session.plain_model(self.wrapped)
        model.average.mul_(0.9).add_(model.first(x).detach().mean(0), alpha=0.1 * self.share)
        return outputs


@pytest.mark.parametrize(("share", "kinds"), [(1.0, []), (0.5, [Allow.stale_buffers])], ids=["right", "wrong"])
def test_a_buffer_that_moves_must_move_to_the_same_values(share: float, kinds: list[Allow]) -> None:
    model, data = Averaging(), batches(1, 1, 1)
    model.rate = 0.0
    check = QuickCheck(MendedFromOutside(wrap(model), share), make_task(model, data[0]), contextlib.nullcontext)
    assert [one.kind for one in check.findings(data)] == kinds


def test_a_random_model_is_not_mistaken_for_a_wrong_one() -> None:
    assert findings(Noisy(), batches(1, 1, 1)) == []


class Unfit(Net):
    """Fails in PyTorch too."""

    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.ones(7, 7)


def test_what_only_pytorch_runs_is_refused_in_one_line_with_the_cause() -> None:
    with pytest.raises(RequestError) as caught:
        findings(Exotic(), batches(1, 1, 1))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("backend=ort cannot train this model", "aten::fft_hfft", "backend=eager"):
        assert part in message
    assert re.search(r"`return torch.fft.hfft\(.*\)` at \S*test_check_quick.py:\d+ cannot be exported: ", message)


class Cox(Net):
    """Goes through the samples that have had an event."""

    def between(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        events = (x[:, 1] >= x[:, 1].mean()).nonzero()[:, 0]
        terms = [hidden[index] - hidden[x[:, 0] >= x[index, 0]].logsumexp(0) for index in events]
        return hidden + torch.stack(terms).mean()


def test_a_loop_as_long_as_a_batch_says_is_named() -> None:
    with pytest.raises(RequestError, match=r"Split of `terms = .* in events\]` at \S*check_quick.py:\d+ fails"):
        findings(Cox(), [{**one, "x": torch.randn(4, 8)} for one in batches(1, 1, 1)])


def test_an_error_that_pytorch_has_too_is_the_models_own() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        findings(Unfit(), batches(1, 1, 1))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Traceback:\n  File x\nValueError: no such axis\n\nsee the log", "ValueError: no such axis"),
        (
            "/onnxruntime_src/a/b.cc:548 void f(X*)::<lambda(Y*)> [ONNXRuntimeError] : 2 : INVALID_ARGUMENT : no way.",
            "no way.",
        ),
        ("/onnxruntime_src/a/b.cc:29 bool g(X&) builder was false. Atan", "builder was false. Atan"),
        (
            "SymbolicValueError: not constant  [Caused by the value 'x' defined in (%0)",
            "SymbolicValueError: not constant",
        ),
    ],
)
def test_a_cause_is_what_is_the_matter(text: str, found: str) -> None:
    assert cause(RuntimeError(text)) == found


def test_a_model_that_fell_back_is_left_alone() -> None:
    assert findings(Exotic(), batches(1, 1, 1), OrtConfig(fallback=Fallback.warn)) == []


class Evaluated(Net):
    """Its train() leaves it in evaluation mode."""

    def train(self, mode: bool = True) -> Evaluated:
        super().train(False)
        return self


def test_a_model_that_trains_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(RequestError, match="the model is in evaluation mode when a run trains it"):
        findings(Evaluated().train(), batches(1, 1, 1))


def test_outputs_that_are_wrong_from_the_start_are_told_from_a_frozen_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx import register_custom_op_symbolic, unregister_custom_op_symbolic

    session.import_ortmodule()
    register_custom_op_symbolic("aten::tanh", lambda g, x: g.op("Sigmoid", x), 17)
    try:
        (found,) = findings(Branching(), batches(1, 1, 1))
    finally:
        unregister_custom_op_symbolic("aten::tanh", 17)
    assert found.kind is Allow.wrong_outputs


def test_training_afterwards_is_as_if_there_had_been_no_check() -> None:
    """Weights, buffers, gradients, counters and the random numbers of the run are those of a run without the check."""
    data = batches(1, 1, 1)

    def trained(check: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = Averaging()
        wrapped, task = wrap(model), make_task(model, data[0])
        if check:
            before = copy.deepcopy(model.state_dict())
            mode, drawn = model.training, torch.get_rng_state()
            QuickCheck(wrapped, task, contextlib.nullcontext).findings(data)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert model.training == mode
            assert model.calls == 0
            assert all(parameter.grad is None for parameter in model.parameters())
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name]), name
        else:
            # The export that the check makes belongs to the first step here; its pass moves buffers.
            task.outputs(wrapped, data[0])
            model.average.zero_()
        seed_everything(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in data:
            loss = task.loss(wrapped, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict(), torch.rand(3)

    with_check, without = trained(True), trained(False)
    assert with_check[0] == without[0]
    assert torch.equal(with_check[2], without[2])
    for name, value in with_check[1].items():
        assert torch.equal(value, without[1][name]), name


def test_the_precision_of_the_run_is_the_precision_of_the_check() -> None:
    entered = []
    model, data = Net(), batches(1, 1, 1)

    @contextlib.contextmanager
    def precision():
        entered.append((torch.is_grad_enabled(), model.training))
        yield

    QuickCheck(wrap(model), make_task(model, data[0]), precision).findings(data)
    # Also PyTorch's passes run as in training: a model may look at whether gradients are on. A model that counts is
    # also tried in evaluation.
    assert len(entered) > 3
    assert set(entered) == {(True, True), (False, False)}
