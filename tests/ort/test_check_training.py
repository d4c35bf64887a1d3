"""The check at a run's start of what training uses, gradients and Python state, and what is checked in later steps."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import itertools
import os
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from onnx import helper
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import RequestError, TrainingError, WrongGradientsError
from ortlaunch.config.schema import Allow, OrtConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.tracing import decisions
from ortlaunch.ort.verify import gradients as gradients_module
from ortlaunch.ort.verify.dropout_off import dropout_off
from ortlaunch.ort.verify.gradients import Errors, Gradients
from ortlaunch.ort.verify.graph import TracedGraph
from ortlaunch.ort.verify.start import QuickCheck, gradient_error
from ortlaunch.ort.verify.state import ModelState
from ortlaunch.ort.verify.trap import Finding
from ortlaunch.trainer.backend_run import OrtRun
from ortlaunch.trainer.workers import Workers
from tests.support.nightly import first_in_ci

CALLS = 0


class Steps(NamedTuple):
    count: int


class Net(nn.Module):
    """Classifies; what a test is about happens in `middle`."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.rate = rate
        self.steps = 0
        self.kept: dict[str, int] = {"steps": 0}
        self.losses: list[float] = []

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(torch.relu(self.first(x)), self.rate, self.training)
        return functional.cross_entropy(self.last(self.middle(hidden, labels) * self.scale), labels)


def drawn(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(12, 8, generator=generator), "labels": torch.randint(0, 3, (12,), generator=generator)}
        for _ in range(count)
    ]


def wrapped_model(model: nn.Module, *, torch_kernels: bool = True) -> nn.Module:
    return session.wrap(model, OrtConfig(export_cache=False, torch_kernels=torch_kernels), threads=1, onnx_dir=None)


def findings(wrapped: nn.Module) -> list[Finding]:
    data = drawn()
    task = make_task(session.plain_model(wrapped), data[0])
    return QuickCheck(wrapped, task, contextlib.nullcontext).findings(data)


def double_a_gradient(wrapped: nn.Module, parameter: str) -> None:
    """Makes the finished training graph return twice a parameter's gradient, as an operator's wrong gradient would."""
    manager = session.training_manager(wrapped)
    assert manager is not None
    graph = manager._onnx_models.optimized_model.graph
    names = manager._graph_transition_manager._post_export_processed_model_info.onnx_graph_input_names
    index = manager._gradient_map[next(i for i, name in enumerate(names) if name.endswith(parameter))]
    graph.node.append(helper.make_node("Add", [graph.output[index].name] * 2, ["doubled"]))
    # ONNX Runtime cannot tell what an ATen node returns.
    graph.value_info.append(graph.output[index])
    graph.output[index].name = "doubled"
    manager._create_execution_agent()


def trained(model: nn.Module, *, torch_kernels: bool = True) -> nn.Module:
    """Wraps a model, and has it make its training graph."""
    wrapped = wrapped_model(model, torch_kernels=torch_kernels)
    make_task(model, drawn()[0]).loss(wrapped, drawn()[0]).backward()
    return wrapped


class Recurrent(Net):
    """Drops out between layers, and whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(16, 16, 2, dropout=0.3, batch_first=True)
        self.channels = nn.Dropout1d(0.4)

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.channels(self.layers(hidden[None].expand(2, -1, -1))[0].transpose(1, 2))[0].T


class Alpha(Net):
    """Drops elements and whole features to SELU's limit."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = functional.alpha_dropout(hidden, 0.3, self.training)
        return functional.feature_alpha_dropout(hidden.unflatten(1, (8, 2)), 0.4, self.training).flatten(1)


@pytest.mark.parametrize("make", [Recurrent, Alpha])
def test_every_kind_of_dropout_is_off_in_a_comparison(make: Callable[[], Net]) -> None:
    torch.manual_seed(0)
    model, data = make(), drawn()
    wrapped, task = trained(model), make_task(model, drawn()[0])
    compared = Gradients(wrapped, task, contextlib.nullcontext, ModelState(model))
    gradients: dict[str, torch.Tensor] = {}
    loss = compared._under_ort(data[1], gradients.__setitem__)
    expected: dict[str, torch.Tensor] = {}
    torch.testing.assert_close(loss, compared._computed(model, data[1], expected.__setitem__))
    torch.testing.assert_close(gradients, expected)
    torch.testing.assert_close(TracedGraph(wrapped)(**data[1]), loss)


def test_a_model_that_has_changed_is_exported_again_within_a_comparison() -> None:
    model, data = Net(), drawn()
    wrapped = trained(model)
    model.steps += 1
    assert gradient_error(wrapped, make_task(model, data[0]), contextlib.nullcontext, data[1]) is None


@pytest.mark.parametrize("torch_kernels", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_wrong_gradient_is_found_also_behind_dropout(rate: float, torch_kernels: bool) -> None:
    torch.manual_seed(0)
    wrapped = trained(Net(rate), torch_kernels=torch_kernels)
    assert findings(wrapped) == []
    double_a_gradient(wrapped, "last.weight")
    (found,) = findings(wrapped)
    assert found.kind is Allow.wrong_gradients
    assert "the gradient of last.weight differs by" in found.what
    assert "backend.allow=[wrong_gradients]" in found.refusal()


def test_the_check_leaves_gradients_and_hooks_alone() -> None:
    wrapped = trained(Net(0.3))
    before = {
        name: parameter.grad.clone() for name, parameter in wrapped.named_parameters() if parameter.grad is not None
    }
    called: list[str] = []
    for name, parameter in wrapped.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    assert findings(wrapped) == []
    assert called == []
    assert before
    for name, parameter in wrapped.named_parameters():
        assert (name in before) == (parameter.grad is not None)
        if name in before:
            torch.testing.assert_close(parameter.grad, before[name], rtol=0, atol=0)


class Sensitive(Net):
    """BatchNorm over values that hardly differ: rounding in fp32 decides its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, eps=1e-12)

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden * 1e-4 + 100)


def test_a_model_in_which_rounding_decides_is_judged_by_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Sensitive()
    wrapped = trained(model)
    data = drawn()
    gradients = Gradients(wrapped, make_task(model, data[0]), contextlib.nullcontext, ModelState(model))
    assert gradients.errors(data[1], 10.0) == Errors()
    # All that differ are judged, some at a time.
    judged: list[list[str]] = []
    in_fp64 = Gradients._run_in_fp64

    def noted(self: Gradients, batch: Batch, take: Any, names: list[str]) -> bool:
        judged.append(names)
        return in_fp64(self, batch, take, names)

    monkeypatch.setattr(Gradients, "_run_in_fp64", noted)
    monkeypatch.setattr(gradients_module, "_JUDGED", 0.0)
    monkeypatch.setattr(gradients_module, "_AT_ONCE", 0)
    assert gradients.errors(data[1], 10.0) == Errors()
    assert len(judged) > 1
    assert all(len(names) == 1 for names in judged)
    # Without fp64 it would be refused.
    monkeypatch.setattr(Gradients, "_run_in_fp64", lambda *_: False)
    assert gradients.errors(data[1], 10.0).gradients is not None


class Kink(Net):
    """A ReLU whose argument is half a rounding above zero."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden + functional.relu(self.scale - (1 - 2.0**-24))


class OtherRounding(Gradients):
    """Gives ONNX Runtime a weight that is a rounding smaller, for rounding differs from one processor to the next."""

    def _under_ort(self, *args: Any) -> torch.Tensor:
        with torch.no_grad():
            self._plain.scale.sub_(2.0**-23)
        try:
            return super()._under_ort(*args)
        finally:
            with torch.no_grad():
                self._plain.scale.add_(2.0**-23)


def test_pytorch_may_be_right_by_luck_beside_a_kink() -> None:
    torch.manual_seed(0)
    model = Kink()
    wrapped, data = trained(model), drawn()
    gradients = OtherRounding(wrapped, make_task(model, data[0]), contextlib.nullcontext, ModelState(model))
    assert gradients.errors(data[1], 10.0) == Errors()
    # What rounding does not explain is wrong all the same.
    double_a_gradient(wrapped, "last.weight")
    assert "last.weight differs by 1 " in str(gradients.errors(data[1], 10.0).gradients)


def test_gradients_are_compared_as_they_come() -> None:
    model = Net()
    expected = model(**drawn()[0])
    alive: list[int] = []
    seen: list[StorageWeakRef] = []

    def take(name: str, gradient: torch.Tensor) -> None:
        alive.append(sum(not one.expired() for one in seen))
        seen.append(StorageWeakRef(gradient.untyped_storage()))

    gradients_module._differentiate(expected, dict(model.named_parameters()), take)
    assert len(seen) == 5
    assert max(alive) <= 1


def test_the_session_without_dropout_has_no_arena_and_leaves_the_runs_own() -> None:
    wrapped = trained(Net(0.3))
    manager = session.training_manager(wrapped)
    assert manager is not None
    own = manager._execution_agent

    def options() -> Any:
        return manager._execution_agent._inference_session.get_session_options()

    assert options().enable_cpu_mem_arena
    with dropout_off(wrapped):
        assert not options().enable_cpu_mem_arena
        assert options().optimized_model_filepath == ""
    assert manager._execution_agent is own
    assert manager._get_session_config()[0].enable_cpu_mem_arena


@pytest.mark.parametrize("backward", [True, False])
def test_checkpoints_that_enter_again_are_compared(backward: bool) -> None:
    class Checkpointed(Net):
        def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = hidden if backward else hidden.detach()
            return checkpoint(torch.sin, hidden, use_reentrant=True) + hidden

    assert findings(wrapped_model(Checkpointed())) == []


CONTEXT = contextvars.ContextVar("CONTEXT", default=0)
THREAD = threading.local()


class Warming(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return hidden * (1.0 + self.steps / 10_000)


class Periodic(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return hidden * 2 if self.steps % 1000 == 0 else hidden


class InDict(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.kept["steps"] += 1
        return hidden * (1.0 + self.kept["steps"] / 10_000)


class InGlobal(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return hidden * 2 if CALLS > 1_000_000 else hidden


class BesideGru(Net):
    """A recurrent layer holds weak references, which have no description."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 16)

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.kept["steps"] += 1
        return self.recurrent(hidden[None])[0][0] * (1.0 + self.kept["steps"] / 100)


class Carrying(Net):
    """A state from batch to batch in an attribute."""

    state: torch.Tensor | None = None

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            hidden = hidden + 0.1 * self.state
        self.state = hidden.detach()
        return hidden


class Averaging(Net):
    """A running mean that further passes over one batch do not move."""

    mean: torch.Tensor | None = None

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        now = hidden.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return hidden - self.mean


class Delayed(Net):
    """What one batch leaves for the next is the same after each pass over one batch."""

    before: torch.Tensor | None = None

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        before, self.before = self.before, hidden.detach().mean(0)
        return hidden if before is None else hidden + before


class InOwnDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.means: dict[str, torch.Tensor] = {}

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        now = hidden.detach().mean(0)
        self.means["all"] = (self.means.get("all", now) + now) / 2
        return hidden - self.means["all"]


class Later(Net):
    """Has an effect after more steps than the check makes."""

    counted: Any = None

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if self.count() > 500 else hidden

    def count(self) -> Any:
        raise NotImplementedError


class LaterByLength(Later):
    def count(self) -> Any:
        self.losses.append(0.0)
        return len(self.losses)


class LaterInDict(Later):
    def count(self) -> Any:
        self.kept["steps"] += 1
        return self.kept["steps"]


class LaterInObject(Later):
    def count(self) -> Any:
        self.counted = self.counted or types.SimpleNamespace(steps=0)
        self.counted.steps += 1
        return self.counted.steps


class LaterInTuple(Later):
    def count(self) -> Any:
        self.counted = ((self.counted or (0,))[0] + 1,)
        return self.counted[0]


class LaterInTensor(Later):
    def count(self) -> Any:
        self.counted = torch.zeros(()) if self.counted is None else self.counted + 1
        return self.counted


class LaterInArray(Later):
    def count(self) -> Any:
        self.counted = numpy.zeros(2) if self.counted is None else self.counted
        self.counted[0] += 1
        return self.counted[0]


class LaterByBits(Later):
    """Nothing compares the counter, and torch does not get it."""

    def count(self) -> Any:
        self.steps += 1
        return (self.steps >> 9) * 1000


class LaterByTable(Later):
    def count(self) -> Any:
        self.steps += 1
        self.counted = self.counted or [0] * 500 + [501] * 1000
        return self.counted[self.steps]


class LaterByText(Later):
    text = ""

    def count(self) -> Any:
        self.text += "a"
        return 501 if self.text.endswith("a" * 400) else 0


class LaterByDigits(Later):
    def count(self) -> Any:
        self.steps += 1
        return 501 if str(self.steps) == "700" else 0


class LaterByFormat(Later):
    def count(self) -> Any:
        self.steps += 1
        return 501 if f"step {self.steps}".endswith("000") else 0


class LaterByTensorInPeriods(Later):
    def count(self) -> Any:
        self.counted = torch.zeros(()) if self.counted is None else self.counted + 1
        return 501 if self.counted % 100 == 0 and self.counted > 0 else 0


class LaterByArrayInPeriods(Later):
    def count(self) -> Any:
        self.counted = numpy.ones(2) if self.counted is None else self.counted
        self.counted[0] += 1
        return 501 if self.counted[0] % 128 == 127 else 0


class LaterByTuple(Later):
    def count(self) -> Any:
        self.counted = Steps(self.counted.count + 1 if self.counted else 0)
        return self.counted.count


class LaterInGradients(Net):
    """The outputs stay the same."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return hidden.detach() if self.steps >> 9 else hidden


class LaterByStages(Net):
    """The comparison has an effect on what another one sees later."""

    stage = 0

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps % 100 == 0:
            self.stage += 1
        return hidden * 2 if self.stage > 3 else hidden


class LaterByRate(Net):
    """The comparison has an effect on the next forward."""

    factor = 1.0

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.factor
        self.steps += 1
        self.factor = self.factor * 0.5 if self.steps % 100 == 0 else self.factor * 1.0
        return hidden


class LaterDroppingOut(Net):
    """The rate of a dropout goes by a count."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return functional.dropout(hidden, 0.1 if self.steps < 600 else 0.5, self.training)


class LaterDroppingOutInAttention(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        rate = 0.1 if self.steps < 600 else 0.5
        return functional.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None], dropout_p=rate)[0]


class LaterByLoop(Later):
    def count(self) -> Any:
        self.steps += 1
        return 501 if any(self.steps == at for at in (300, 600)) else 0


class LaterInEvaluation(Net):
    """Training counts, and only evaluation uses the number."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            return hidden
        return hidden * (1.0 + self.steps % 7)


class LaterByIterator(Later):
    def count(self) -> Any:
        self.counted = self.counted or itertools.count()
        return next(self.counted)


class LaterByGenerator(Later):
    def count(self) -> Any:
        self.counted = self.counted or (number for number in range(10_000))
        return next(self.counted)


class LaterByContext(Later):
    def count(self) -> Any:
        CONTEXT.set(CONTEXT.get() + 1)
        return CONTEXT.get()


class LaterByThread(Later):
    def count(self) -> Any:
        THREAD.count = getattr(THREAD, "count", 0) + 1
        return THREAD.count


class LaterByEnvironment(Later):
    def count(self) -> Any:
        os.environ["LATER_COUNT"] = str(int(os.environ.get("LATER_COUNT", "0")) + 1)
        return int(os.environ["LATER_COUNT"])


class BesideAList(Later):
    """A list that only grows hides no counter."""

    def count(self) -> Any:
        global CALLS
        self.losses.append(0.0)
        CALLS += 1
        return CALLS


STATES = [Warming, Periodic, InDict, InGlobal, BesideGru, Carrying, Averaging, Delayed, InOwnDict]
LATER = [
    LaterByLength,
    LaterInDict,
    LaterInObject,
    LaterInTuple,
    LaterInTensor,
    LaterInArray,
    LaterByBits,
    LaterByTable,
]
LATER += [LaterByText, LaterByDigits, LaterByFormat, LaterByTensorInPeriods, LaterByArrayInPeriods, LaterByTuple]
LATER += [
    LaterInGradients,
    LaterByStages,
    LaterByRate,
    LaterInEvaluation,
    LaterDroppingOut,
    LaterDroppingOutInAttention,
    LaterByLoop,
    LaterByIterator,
    LaterByGenerator,
    LaterByContext,
    LaterByThread,
    LaterByEnvironment,
    BesideAList,
]


# Which are found as one of the others is, by the same values, texts or objects.
NIGHTLY = [InDict, Carrying, InOwnDict, LaterInDict, LaterInTuple, LaterInArray, LaterByBits, LaterByDigits]
NIGHTLY += [LaterByFormat, LaterByArrayInPeriods, LaterByTuple, LaterByRate, LaterDroppingOutInAttention]
NIGHTLY += [LaterByGenerator, LaterByThread]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in NIGHTLY)) for kind in [*STATES, *LATER]],
)
def test_python_state_that_matters_is_found(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATER_COUNT", "0")
    kinds = [one.kind for one in findings(wrapped_model(kind()))]
    assert Allow.python_state in kinds


class Counting(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.losses.append(0.0)
        self.shown = hidden.detach()
        return hidden


class Logging(Net):
    """Keeps what it has seen, and uses none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.means = {"loss": torch.zeros(()), "steps": 0}
        self.sums = numpy.zeros(2)
        self.recent: deque[float] = deque(maxlen=3)

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        now = hidden.detach().mean()
        self.means["loss"] = 0.9 * self.means["loss"] + 0.1 * now
        self.means["steps"] += 1
        self.sums[0] += float(now)
        self.recent.append(float(now))
        return hidden


class LoggingSometimes(Net):
    """Compares what decides on logs alone."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps % 100 == 0:
            print(f"step {self.steps}")
        self.losses.append(float(hidden.detach().mean()))
        if len(self.losses) > 100:
            self.losses.pop(0)
        while len(self.losses) > 200:
            self.losses = self.losses[1:]
        return hidden


class Caching(Net):
    """Makes a table in the first forward."""

    table: torch.Tensor | None = None

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(16.0)
        return hidden + self.table


@pytest.mark.parametrize("kind", [Counting, Logging, LoggingSometimes, Caching])
def test_python_state_that_does_not_matter_passes(kind: type[Net]) -> None:
    model = kind()
    assert findings(wrapped_model(model)) == []
    assert type(model.steps) is int


PACKAGE = """
import torch

calls = 0

def scaled(values):
    global calls
    calls += 1
    scaled.calls = calls
    return values * 2.0

class Warming(torch.nn.Module):
    steps = 0

    def forward(self, values):
        self.steps += 1
        return values * (1.0 + self.steps / 10_000)
"""
PART: Any = None


class Calling(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return PART(hidden)


@pytest.mark.parametrize(
    ("is_installed", "part", "found"),
    [
        (True, "scaled", []),
        (False, "scaled", [Allow.python_state]),
        (True, "Warming", [Allow.python_state]),
    ],
)
def test_what_an_installed_package_keeps_for_itself_is_no_state_of_the_model(
    is_installed: bool, part: str, found: list[Allow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazily.py").write_text(PACKAGE)
    if is_installed:
        # As pip leaves it, also outside of site-packages.
        record = tmp_path / "lazily-1.0.dist-info" / "RECORD"
        record.parent.mkdir()
        record.write_text("lazily.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazily", raising=False)
    used = getattr(importlib.import_module("lazily"), part)
    model = Calling()
    if part == "Warming":
        used = model.part = used()
    monkeypatch.setitem(globals(), "PART", used)
    assert [one.kind for one in findings(wrapped_model(model))][:1] == found


class Merging(Counting):
    """Changes a weight in evaluation mode, and changes it back, as LoRA's layers do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        if mode is self.merged:
            with torch.no_grad():
                self.last.weight += -0.5 if mode else 0.5
            self.merged = not mode
        super().train(mode)
        return self


def test_the_check_leaves_weights_that_are_merged_in_evaluation_mode_as_they_were() -> None:
    model = Merging()
    before = model.last.weight.detach().clone()
    assert findings(wrapped_model(model)) == []
    torch.testing.assert_close(model.last.weight.detach(), before)
    assert model.training and not model.merged


class Deciding(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] > 2:
            hidden = hidden * 1.0
        self.largest = hidden.max().item()
        if (labels == 3).any():
            hidden = hidden * 2
        return hidden


def test_a_decision_that_changes_stops_the_step_that_changes_it() -> None:
    model = Deciding()
    wrapped = wrapped_model(model)
    data = drawn()
    task = make_task(model, data[0])
    assert findings(wrapped) == []
    decisions.enforce()
    for batch in data:
        # The largest value differs in each batch, and decides nothing.
        task.loss(wrapped, batch).backward()
    rare = data[1] | {"labels": torch.full((12,), 3)}
    with pytest.raises(RequestError, match=r"`if \(labels == 3\).any\(\):` at .*reads True .* traced with False"):
        task.loss(wrapped, rare)


def test_a_decision_that_changes_on_the_first_batches_is_a_frozen_branch() -> None:
    model = Deciding()
    wrapped = wrapped_model(model)
    data = drawn()
    data[2]["labels"][:] = 3
    found = QuickCheck(wrapped, make_task(model, data[0]), contextlib.nullcontext).findings(data)
    assert [one.kind for one in found] == [Allow.frozen_branch]


class Counted(Net):
    """Its number differs in each batch, and decides something in a few of them."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if int(labels.sum()) % 7 == 0 else hidden


class Bounded(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if labels.float().mean().item() > 2.5 else hidden


def summing(*sums: int) -> list[Batch]:
    """A batch for each sum of the labels."""
    made = []
    for batch, total in zip(drawn() * len(sums), sums, strict=False):
        labels = torch.zeros(12, dtype=torch.long)
        labels[: total // 3], labels[total // 3] = 3, total % 3
        made.append(batch | {"labels": labels})
    return made


@pytest.mark.parametrize(
    ("kind", "harmless", "decides", "words"),
    [
        (Counted, (9, 12, 9), 14, "reads 14"),
        # Between two that were compared, nothing needs to be compared again.
        (Bounded, (10, 9, 11, 12), 33, "reads 2.75"),
    ],
)
def test_a_number_that_differs_and_decides_nothing_yet_is_compared_when_it_is_new(
    kind: type[Net], harmless: tuple[int, ...], decides: int, words: str
) -> None:
    model = kind()
    wrapped = wrapped_model(model)
    first = summing(8, 10, 13)
    task = make_task(model, first[0])
    backend = run_of(wrapped, OrtConfig(export_cache=False))
    backend.check(task, first)
    compared = []
    for batch in summing(*harmless):
        task.loss(wrapped, batch).backward()
        compared.append(backend.micro_batch_ends(batch))
    assert compared == ([True, True, False] if kind is Counted else [False] * 4)
    (batch,) = summing(decides)
    task.loss(wrapped, batch).backward()
    with pytest.raises(RequestError, match=rf"{words} in this step.* traced with .*frozen_branch"):
        backend.micro_batch_ends(batch)


def test_a_decision_that_changes_in_an_evaluation_is_compared_with_pytorch() -> None:
    model = Bounded()
    wrapped = wrapped_model(model)
    first = summing(8, 10, 13)
    task = make_task(model, first[0])
    backend = run_of(wrapped, OrtConfig(export_cache=False))
    backend.check(task, first)
    wrapped.eval()
    compared = []

    def evaluated(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            loss = task.loss(wrapped, batch)
        compared.append(len(decisions._unverified_in_evaluation))
        backend.evaluated(batch)
        return loss

    for batch in summing(9, 12, 10, 11):
        with torch.no_grad():
            torch.testing.assert_close(evaluated(batch), task.loss(model, batch))
    # The graph's own number, a new one, and two between these.
    assert compared == [0, 1, 0, 0]
    (batch,) = summing(33)
    with pytest.raises(RequestError, match=r"in the evaluation, .* reads 2.75 .* traced with 0.75.*the loss of this"):
        evaluated(batch)


class Unrolled(Net):
    """Loops over a size."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden[0])
        for row in range(hidden.shape[0]):
            total = total + hidden[row]
        return hidden + total


def rows(batch: Batch, count: int) -> Batch:
    return {name: tensor.repeat(2, *[1] * (tensor.dim() - 1))[:count] for name, tensor in batch.items()}


class Course:
    """A model after the check at the start of a run with these batches."""

    def __init__(self, model: nn.Module, data: list[Batch]) -> None:
        self._wrapped = wrapped_model(model)
        self._task = make_task(model, data[0])
        self.backend = run_of(self._wrapped, OrtConfig(export_cache=False))
        self.backend.check(self._task, data)

    def compares(self, batch: Batch) -> bool:
        """Trains on a batch; whether its gradients were compared."""
        has_compared = self.backend.micro_batch_begins(1, 1, batch)
        self._task.loss(self._wrapped, batch).backward()
        return has_compared | self.backend.micro_batch_ends(batch)

    def evaluate(self, batch: Batch) -> None:
        self._wrapped.eval()
        with torch.no_grad():
            self._task.loss(self._wrapped, batch)
        self.backend.evaluated(batch)
        self._wrapped.train()


class RareBySize(Net):
    """For one size a value of Python decides, which a graph for that size would freeze."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * float(numpy.abs(labels.numpy()).sum()) if hidden.shape[0] == 16 else hidden


@pytest.mark.parametrize("kind", [Net, Unrolled, RareBySize])
def test_a_batch_of_new_sizes_is_compared(kind: type[Net]) -> None:
    torch.manual_seed(0)
    data = drawn()
    course = Course(kind(), data)
    assert not course.compares(data[1])
    if kind is not RareBySize:
        assert [course.compares(rows(data[1], count)) for count in (16, 7, 16, 12)] == [True, True, False, False]
    else:
        with pytest.raises(RequestError, match=r"x \(16, 8\), labels \(16,\)\), whose sizes are new, .*gradient"):
            course.compares(rows(data[1], 16))


FACTORS = [1.0]


class Part(nn.Module):
    """Not registered where a list holds it."""

    factor = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


class DropsOutBySize(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.dropout(hidden, 0.1 if hidden.shape[0] < 14 else 0.5, self.training)


class DropsOutByBuffer(Net):
    """The rate is a number that Python reads of a buffer, and grows from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1)
        return functional.dropout(hidden, (self.get_buffer("count") / 20).clamp(max=0.5).item(), self.training)


def test_a_size_that_decides_the_rate_of_a_dropout_has_a_graph_of_its_own() -> None:
    data = drawn()
    course = Course(DropsOutBySize(), data)
    assert course.compares(rows(data[0], 13))
    assert max(session.traced_rates(course._wrapped)) == pytest.approx(0.1)
    assert course.compares(rows(data[0], 16))
    assert max(session.traced_rates(course._wrapped)) == 0.5
    course.compares(rows(data[0], 13))
    assert max(session.traced_rates(course._wrapped)) == pytest.approx(0.1)


def test_a_rate_of_dropout_that_a_buffer_decides_is_compared() -> None:
    with pytest.raises(RequestError, match=r"the rate of a dropout is 0\.15 in PyTorch and 0\.05 in ONNX Runtime"):
        Course(DropsOutByBuffer(), drawn())


class Turning(Net):
    """Its ``train()`` changes what forward goes by when the third evaluation begins or ends."""

    def __init__(self, what: str, *, when_training: bool) -> None:
        super().__init__()
        self.what = what
        self.when_training = when_training
        self.modes: list[bool] = []
        self.factors = [1.0]
        self.function = torch.relu
        self.parts = [Part()]
        self.register_buffer("table", torch.ones(16), persistent=False)

    def train(self, mode: bool = True) -> Turning:
        super().train(mode)
        if self.what != "no list":
            self.modes.append(mode)
        if self.modes.count(self.when_training) == 3 and mode is self.when_training:
            if self.what == "list":
                self.factors[0] = 2.0
            elif self.what == "global":
                FACTORS[0] = 2.0
            elif self.what == "part":
                self.parts[0].factor = 2.0
            elif self.what == "table":
                self.get_buffer("table").fill_(2.0)
            elif self.what == "function":
                self.function = torch.tanh
        return self

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.function(hidden - 0.5) * self.get_buffer("table")
        return self.parts[0](hidden * self.factors[0] * FACTORS[0])


def turning(what: str, *, when_training: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Course, list[Batch]]:
    """A run after its second evaluation; the third is none of those after which it compares anyway."""
    monkeypatch.setitem(globals(), "FACTORS", [1.0])
    torch.manual_seed(0)
    data = drawn()
    course = Course(Turning(what, when_training=when_training), data)
    for _ in range(2):
        course.evaluate(data[0])
        assert course.compares(data[1])
    return course, data


@pytest.mark.parametrize("what", first_in_ci(["list", "part", "global", "table"], 2))
def test_what_a_train_of_the_models_own_changes_is_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    course, data = turning(what, when_training=True, monkeypatch=monkeypatch)
    course.evaluate(data[0])
    with pytest.raises(WrongGradientsError, match=r"^after an evaluation, .*train\(\) changes what forward goes by"):
        course.compares(data[1])


def test_what_an_eval_of_the_models_own_changes_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    course, data = turning("list", when_training=False, monkeypatch=monkeypatch)
    with pytest.raises(RequestError, match="in evaluation mode the loss of this batch is"):
        course.evaluate(data[0])


@pytest.mark.parametrize("what", first_in_ci(["no list", "nothing", "function"], 1))
def test_a_train_of_the_models_own_that_changes_no_number_passes(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is followed by another export; only what has changed is compared."""
    course, data = turning(what, when_training=True, monkeypatch=monkeypatch)
    course.evaluate(data[0])
    assert course.compares(data[1]) is (what != "no list")


class MovedInEvaluation(Net):
    """Evaluation moves a buffer, which training reads; `saved` says whether checkpoints have it."""

    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.register_buffer("moved", torch.ones(16), persistent=saved)

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.moved.add_(hidden.detach().abs().mean(0))
        return hidden * self.moved


class CountsEvaluations(Net):
    """Counts the batches that it evaluates; `reads` says whether training does something with the number."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.evaluated = 0

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.evaluated += 1
            return hidden
        return hidden * (1.0 + 0.5 * self.evaluated) if self.reads else hidden


@pytest.mark.parametrize("reads", [True, False])
def test_a_number_that_only_evaluation_changes_and_training_reads_is_refused(reads: bool) -> None:
    torch.manual_seed(0)
    model, data = CountsEvaluations(reads), drawn()
    course = Course(model, data)
    course.evaluate(data[0])
    if reads:
        with pytest.raises(WrongGradientsError, match="does not change evaluated as PyTorch does"):
            course.compares(data[1])
    else:
        counted = model.evaluated
        assert course.compares(data[1])
        assert model.evaluated == counted


@pytest.mark.parametrize("saved", [True, False])
def test_the_first_batch_after_an_evaluation_is_compared(saved: bool) -> None:
    torch.manual_seed(0)
    data = drawn()
    course = Course(MovedInEvaluation(saved), data)
    assert not course.compares(data[1])
    course.evaluate(data[0])
    if not saved:
        with pytest.raises(WrongGradientsError, match=r"^after an evaluation, .* a buffer that is not saved"):
            course.compares(data[1])
        return
    compared = [course.compares(data[1]), course.compares(data[2])]
    for _ in range(3):
        course.evaluate(data[0])
        compared.append(course.compares(data[1]))
    # After the first, the second and the fourth evaluation.
    assert compared == [True, False, True, False, True]


def test_an_evaluated_batch_of_new_sizes_is_compared() -> None:
    torch.manual_seed(0)
    model = Unrolled()
    wrapped = wrapped_model(model)
    data = drawn()
    task = make_task(model, data[0])
    backend = run_of(wrapped, OrtConfig(export_cache=False))
    backend.check(task, data)
    wrapped.eval()
    for number in (0, 1):
        with torch.no_grad():
            task.loss(wrapped, data[number])
        backend.evaluated(data[number])
    # The third one is compared for its sizes alone.
    with pytest.raises(RequestError, match="in evaluation mode the loss of this batch is"):
        backend.evaluated(rows(data[0], 16))


class OtherwiseInEvaluation(Net):
    """What only evaluation mode computes is `way`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("mean", torch.zeros(16))
        self.drop = nn.Dropout(0.5)

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            return hidden
        self.steps += 1
        if self.way == "counter":
            return hidden * self.steps
        if self.way == "buffer":
            self.mean.add_(hidden.mean(0))
            return hidden + self.mean
        return hidden + torch.randn_like(hidden)


def evaluations(way: str, allow: list[Allow], batches: int = 4) -> OrtRun:
    wrapped = wrapped_model(OtherwiseInEvaluation(way))
    data = drawn()
    task = make_task(session.plain_model(wrapped), data[0])
    backend = run_of(wrapped, OrtConfig(export_cache=False, allow=allow))
    backend.check(task, data)
    wrapped.eval()
    for number in range(batches):
        with torch.no_grad():
            task.loss(wrapped, data[number % len(data)])
            backend.evaluated(data[number % len(data)])
    return backend


def test_a_value_of_python_that_changes_in_evaluation_alone_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"in evaluation mode the loss of this batch is .* in PyTorch.*wrong_outputs"
    ):
        evaluations("counter", [])
    evaluations("counter", [Allow.wrong_outputs])


@pytest.mark.parametrize("way", ["buffer", "noise"])
def test_buffers_and_noise_of_an_evaluation_are_no_reason_to_refuse(way: str) -> None:
    backend = evaluations(way, [])
    mean = session.plain_model(backend._engine.inner).get_buffer("mean")
    twin = OtherwiseInEvaluation(way).eval()
    twin.load_state_dict(session.plain_model(backend._engine.inner).state_dict())
    twin.get_buffer("mean").zero_()
    with torch.no_grad():
        for number in range(4):
            twin(**drawn()[number % len(drawn())])
    torch.testing.assert_close(mean, twin.get_buffer("mean"))


class ByCount(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if torch.count_nonzero(labels == 3) > 0 else hidden


class BySpectrum(Net):
    """Decides by an operator that torch's exporter does not have."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if torch.fft.hfft(hidden).max() > 1e6 else hidden


@pytest.mark.parametrize(("kind", "watched"), [(ByCount, 1), (BySpectrum, 0)])
def test_a_decision_by_an_operator_without_an_export_does_not_stop_the_export(kind: type[Net], watched: int) -> None:
    wrapped = wrapped_model(kind())
    assert findings(wrapped) == []
    manager = session.training_manager(wrapped)
    assert manager is not None
    processed = manager._graph_transition_manager._post_export_processed_model_info
    assert len(processed.module_forward_output_schema.decisions.all) == watched


def run_of(wrapped: nn.Module, cfg: OrtConfig) -> OrtRun:
    """The backend of a run with one worker, whose engine is the ORTModule alone."""
    engine = types.SimpleNamespace(
        inner=wrapped, precision_context=contextlib.nullcontext, model_inputs=lambda batch: batch
    )
    return OrtRun(engine, cfg, Workers(0, 1, torch.device("cpu"), 1), Path(), None, blocks=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("allow", [[], [Allow.wrong_gradients]])
def test_gradients_are_compared_again_while_a_run_trains(allow: list[Allow]) -> None:
    model = Net(0.3)
    wrapped = trained(model)
    backend = run_of(wrapped, OrtConfig(recheck_every=5, allow=allow))
    data = drawn()
    backend.check(make_task(model, data[0]), data)
    assert [step for step in range(1, 12) if backend.micro_batch_begins(step, 0, data[0])] == [5, 10]
    double_a_gradient(wrapped, "first.bias")
    assert backend.micro_batch_begins(14, 0, data[0]) is False
    if allow:
        assert backend.micro_batch_begins(15, 0, data[0]) is True
    else:
        with pytest.raises(TrainingError, match=r"step 15: .*the gradient of first.bias differs by"):
            backend.micro_batch_begins(15, 0, data[0])


class Sampling(Net):
    """Adds noise of its own, besides its dropout."""

    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden + torch.randn_like(hidden) * torch.rand(hidden.shape[0], 1)


class SamplingByNumpy(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden + torch.from_numpy(numpy.random.randn(16)).float()


class SkippingByPython(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if random.random() < 0.5 else hidden


@pytest.mark.parametrize("make", [SamplingByNumpy, SkippingByPython])
def test_random_numbers_that_are_not_torchs_are_found(make: type[Net]) -> None:
    (found,) = findings(trained(make()))
    assert found.kind is Allow.python_state
    assert found.what.startswith("forward draws random numbers of Python or NumPy")


class Skipping(Net):
    def middle(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden if torch.rand(()) < 0.5 else hidden * self.scale


def test_a_decision_by_chance_stops_the_first_step_in_which_it_is_another() -> None:
    """Also where the check at the start has seen both, and by chance no difference of the outputs."""
    data = drawn()
    model = Skipping()
    wrapped, task = trained(model), make_task(model, data[0])
    for _ in range(20):
        task.loss(wrapped, data[0])
    decisions.enforce()
    with pytest.raises(RequestError, match=r"`return hidden if torch.rand\(\(\)\) < 0.5 .* reads (True|False) in this"):
        for _ in range(20):
            task.loss(wrapped, data[0])


def test_a_model_that_draws_numbers_is_not_stopped_for_them() -> None:
    model = Sampling(0.3)
    wrapped = trained(model)
    assert findings(wrapped) == []
    assert gradient_error(wrapped, make_task(model, drawn()[0]), contextlib.nullcontext, drawn()[0]) is None


def test_a_wrong_gradient_of_a_model_that_draws_numbers_is_found() -> None:
    model = Sampling(0.3)
    wrapped = trained(model)
    double_a_gradient(wrapped, "first.bias")
    (found,) = findings(wrapped)
    assert found.kind is Allow.wrong_gradients
    error = gradient_error(wrapped, make_task(model, drawn()[0]), contextlib.nullcontext, drawn()[0])
    assert error is not None and "the gradient of first.bias differs by" in error


def test_gradients_that_cannot_be_computed_later_are_told_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sensitive()
    wrapped = trained(model)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Non-zero status code returned while running ConvGrad node.")

    monkeypatch.setattr("ortlaunch.ort.verify.gradients.Gradients.errors", fail)
    error = gradient_error(wrapped, make_task(model, drawn()[0]), contextlib.nullcontext, drawn()[0])
    assert error is not None and error.startswith("ONNX Runtime cannot compute the model's gradients (")
    assert "ConvGrad" in error


def test_a_comparison_leaves_random_numbers_and_buffers_alone() -> None:
    model = Sensitive()
    wrapped = trained(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    assert gradient_error(wrapped, make_task(model, drawn()[0]), contextlib.nullcontext, drawn()[0]) is None
    assert torch.equal(state, torch.get_rng_state())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


class Linear(Net):
    """onnxruntime has no gradient of relu in fp64."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.last(self.first(x)), labels)


def test_batches_are_compared_in_the_dtypes_that_the_engine_gives_to_the_model() -> None:
    """DeepSpeed's engine casts inputs to the precision of the weights."""
    model = Linear().double()
    wrapped = wrapped_model(model)
    backend = run_of(wrapped, OrtConfig(export_cache=False, recheck_every=1))
    cast: Any = backend._engine
    cast.model_inputs = lambda batch: batch | {"x": batch["x"].double()}
    data = drawn()
    backend.check(make_task(model, data[0]), data)
    assert backend.micro_batch_begins(1, 0, data[0])
    wrapped.eval()
    backend.evaluated(data[0])
    assert session.is_active(wrapped)


@pytest.mark.parametrize(("every", "steps"), [(None, [1000, 2000, 4000, 8000]), (0, []), (3000, [3000, 6000, 9000])])
def test_the_steps_that_compare(every: int | None, steps: list[int]) -> None:
    from ortlaunch.trainer.backend_run import _is_due

    assert [step for step in range(1, 10_000) if _is_due(step, every)] == steps
