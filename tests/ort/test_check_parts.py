"""Each part of the check, on models made to be right or wrong in one way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlaunch.check.export import Setting, check_export
from ortlaunch.check.parity import check_parity
from ortlaunch.check.randomness import check_randomness
from ortlaunch.check.report import Export
from ortlaunch.check.structure import check_calls, check_structure
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, ModelConfig, OrtConfig
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort.verify.reference import Reference

HERE = Path(__file__)


class Net(nn.Module):
    """Two layers; the classes below change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


class ByValue(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if x.sum() > 0:  # decided by a value
            hidden = hidden * 3
        return self.last(hidden)


class ByValueInVain(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden + 1 if x.sum() > 0 else 1 + hidden
        return self.last(hidden)


class ByLargeBatch(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1000:
            x = x * 2
        return x


class TimesBatchSize(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.shape[0])


class ByChance(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) > 0.5:
            x = x * 2
        return x


class Noisy(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class NoisyByNumpy(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(numpy.random.randn(*x.shape)).float()


class Exotic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.hfft(  # the operator
            self.scale(x), 8
        )


class NestedExotic(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Exotic()])

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(self.blocks[1](x), 8)


class SmallIntegers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counter = SmallIntegersPadded()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.counter(x)


class SmallIntegersPadded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad((x[:, :7] > 0).to(torch.int16), (0, 1))


class Counting(Net):
    """A buffer of its own that moves where the trace does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        value = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.mean.untyped_storage().copy_(value.untyped_storage())
        return x


class Dropping(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.5, self.training)
        return nn.Dropout(0.3).train(self.training)(x)


class NeverTraining(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5, True)


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.rand(8)
        self.pair = [torch.rand(2), "text"]

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


class Hidden(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8)]


class Chatty(Net):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"logits": super().forward(x), "note": "hello", "none": None, "kinds": {3}, "more": (x, [x])}


def batches(*signs: float) -> list[Batch]:
    """Batches of four samples whose sum has the given signs."""
    torch.manual_seed(1)
    return [{"x": sign * torch.rand(4, 8), "labels": torch.randint(0, 3, (4,))} for sign in signs]


def setting(model: nn.Module, batch: Batch, cfg: OrtConfig | None = None) -> Setting:
    return Setting(make_task(model, batch), contextlib.nullcontext, cfg or OrtConfig(), threads=1, seed=0)


def exported(model: nn.Module, data: list[Batch] | None = None) -> tuple[Export, nn.Module]:
    data = data or batches(1, -1, 1)
    return check_export(model, data, setting(model, data[0]))


def line_of(text: str) -> int:
    (found,) = [number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(text)]
    return found


def test_a_plain_model_is_exported_and_equal_on_every_probe() -> None:
    found, _ = exported(Net())
    assert (found.status, found.succeeded, found.comparable) == ("ok", True, True)
    assert found.seconds is not None and found.seconds > 0
    assert found.tracer_warnings == []
    assert {probe.kind for probe in found.probes} == {"fresh_data", "batch_size"}
    assert {probe.shape[0] for probe in found.probes} == {3, 4, 8}
    assert not any(probe.differs for probe in found.probes)


def test_a_branch_on_a_value_is_found_frozen_where_it_stands() -> None:
    found, _ = exported(ByValue())
    assert found.status == "failed"
    (warning,) = found.tracer_warnings
    assert warning.statement == "if x.sum() > 0:  # decided by a value"
    assert warning.location.endswith(f"{HERE.name}:{line_of('# decided by a value')}")
    assert warning.effect == "changes_outputs"
    fresh = [probe for probe in found.probes if probe.kind == "fresh_data"]
    assert [probe.differs for probe in fresh] == [True, False]
    assert fresh[0].error is not None and fresh[0].error > 0.1


def test_a_branch_that_data_never_takes_otherwise_is_harmless() -> None:
    found, _ = exported(ByValue(), batches(1, 1, 1))
    assert found.status == "ok"
    assert [one.effect for one in found.tracer_warnings] == ["none"]


def test_a_branch_that_changes_nothing_is_told_from_one_that_does() -> None:
    found, _ = exported(ByValueInVain())
    assert [one.effect for one in found.tracer_warnings] == ["decides_otherwise"]
    assert found.status == "warning"
    assert not any(probe.differs for probe in found.probes)


def test_a_look_at_a_size_is_harmless() -> None:
    harmless, _ = exported(ByLargeBatch())
    assert [one.effect for one in harmless.tracer_warnings] == ["none"]
    assert harmless.status == "ok"
    # A run has a graph for each of the sizes.
    sized, _ = exported(TimesBatchSize())
    assert sized.status == "ok"
    assert {probe.kind for probe in sized.probes if probe.own_graph} == {"batch_size"}


def test_a_branch_by_chance_is_frozen_though_outputs_cannot_be_compared() -> None:
    found, _ = exported(ByChance())
    assert [one.effect for one in found.tracer_warnings] == ["decided_by_chance"]
    assert found.status == "failed"


def test_a_model_that_draws_numbers_of_torch_is_compared_with_the_same_numbers() -> None:
    model, data = Noisy(), batches(1, 1, 1)
    found, _ = exported(model, data)
    assert (found.comparable, found.status) == (True, "ok")
    assert found.probes and not any(probe.differs for probe in found.probes)
    parity = check_parity(model, data, setting(model, data[0]))
    assert parity.status == "ok", parity


def test_a_model_that_draws_numbers_of_numpy_is_not_compared_and_not_fit() -> None:
    found, _ = exported(NoisyByNumpy())
    assert (found.comparable, found.status, found.probes) == (False, "failed", [])


def test_every_unsupported_operator_is_named_with_module_and_line() -> None:
    found, _ = exported(NestedExotic())
    assert not found.succeeded
    assert found.error is not None and "fft_hfft" in found.error
    inner, outer = found.unsupported_operators
    assert (inner.name, inner.module) == ("aten::fft_hfft", "blocks.1")
    assert inner.location.endswith(f"{HERE.name}:{line_of('# the operator')}")
    assert inner.statement.startswith("return torch.fft.hfft(")
    assert (outer.name, outer.module) == ("aten::fft_irfft", "")


def test_an_operator_without_a_kernel_is_named_with_its_module() -> None:
    found, _ = exported(SmallIntegers())
    assert not found.succeeded
    assert [(one.name, one.module) for one in found.unsupported_operators] == [("onnx::Pad", "counter")]


def test_a_causal_model_is_equal_at_other_lengths_too() -> None:
    model = build_model(ModelConfig(name="gpt2_nano", params={"n_layer": 1}))
    ids = [torch.randint(0, 256, (2, 16)) for _ in range(3)]
    found, _ = exported(model, [{"input_ids": one, "labels": one} for one in ids])
    assert found.status == "ok"
    lengths = [probe.shape[1] for probe in found.probes if probe.kind == "sequence_length"]
    assert lengths == [8, 15, 24]
    # transformers' own trace warnings: named, and told to be harmless.
    assert found.tracer_warnings
    assert {one.effect for one in found.tracer_warnings} == {"none"}


@pytest.mark.parametrize("make", [Net, Dropping], ids=["plain", "dropout"])
def test_training_has_parity_with_dropout_off(make: Callable[[], nn.Module]) -> None:
    model, data = make(), batches(1, 1, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = check_parity(model, data, setting(model, data[0]))
    assert found.status == "ok", found
    assert found.gradients is not None and found.gradients.count == 4
    assert found.parameters is not None and found.parameters.count == 4
    assert found.steps == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_steps_are_taken() -> None:
    """Guards the comparison after three steps: a frozen branch in the second batch leads to other weights."""
    model, data = ByValue(), batches(1, -1, 1)
    found = check_parity(model, data, setting(model, data[0]))
    assert found.loss is not None and found.loss.ok
    assert found.gradients is not None and found.gradients.ok
    assert found.parameters is not None
    assert "first.weight" in [one.name for one in found.parameters.differing]
    assert found.status == "failed"


def test_a_buffer_that_moves_in_pytorch_alone_is_stale_by_name() -> None:
    model, data = Counting(), batches(1, 1, 1)
    found = check_parity(model, data, setting(model, data[0]))
    assert found.stale_buffers == ["mean"]
    assert found.buffers is not None and [one.name for one in found.buffers.differing] == ["mean"]
    assert found.status == "failed"


def test_outputs_come_back_in_their_dtype_from_kernels_of_another() -> None:
    model, data = Net().half(), [{**batch, "x": batch["x"].half()} for batch in batches(1, 1, 1)]
    # ONNX Runtime's own kernels: it has none of half precision on the CPU.
    found = check_parity(model, data, setting(model, data[0], OrtConfig(torch_kernels=False)))
    assert found.outputs is not None
    assert found.outputs.dtypes == {}


def test_dropout_is_random_in_training_and_off_in_evaluation() -> None:
    model, data = Dropping(), batches(1, 1, 1)
    _, wrapped = exported(model, data)
    found = check_randomness(wrapped, data[0], setting(model, data[0]))
    assert found.status == "ok", found
    assert (found.expected, found.active_in_train, found.differs_per_step, found.differs_per_rank) == (True,) * 4
    assert (found.off_in_eval, found.eval_equals_eager) == (True, True)
    assert wrapped.training


def test_a_model_without_random_numbers_has_none() -> None:
    model, data = Net(), batches(1, 1, 1)
    _, wrapped = exported(model, data)
    found = check_randomness(wrapped, data[0], setting(model, data[0]))
    assert found.status == "ok"
    assert not found.expected
    assert not found.active_in_train


def test_chance_that_the_export_froze_is_missed_in_training() -> None:
    model, data = ByChance(), batches(1, 1, 1)
    _, wrapped = exported(model, data)
    found = check_randomness(wrapped, data[0], setting(model, data[0]))
    assert (found.expected, found.active_in_train) == (True, False)
    assert found.status == "failed"


def test_random_numbers_in_evaluation_are_found() -> None:
    model, data = NeverTraining(), batches(1, 1, 1)
    _, wrapped = exported(model, data)
    found = check_randomness(wrapped, data[0], setting(model, data[0]))
    assert not found.off_in_eval
    assert found.status == "failed"


def plain_config() -> Config:
    return to_config(compose(["model=mlp", "device=cpu"]))


def test_structure_of_a_sound_model() -> None:
    model, data = Net(), batches(1)
    found = check_structure(model)
    check_calls(model, data[0], found, plain_config())
    assert (found.status, found.problems, found.parameters) == ("ok", [], 8 * 8 + 8 + 8 * 3 + 3)
    assert [one.name for one in found.inputs] == ["x", "labels"]
    assert [(one.name, one.shape, one.dtype) for one in found.outputs] == [("output", [4, 3], "float32")]
    check_calls(model, data[0] | {"labels": torch.tensor([0, 1, 2, 7])}, found, plain_config())
    assert found.status == "failed" and found.problems[0].startswith(
        "the data has the label 7 and the model knows 0 to 2"
    )


def test_structure_names_tensors_that_are_not_registered() -> None:
    found = check_structure(Scaled())
    assert found.status == "warning"
    assert [(one.name, one.shape) for one in found.unregistered] == [("table", [8]), ("pair", [2])]


def test_structure_refuses_hidden_parameters_and_things_that_are_no_module() -> None:
    assert "layers" in check_structure(Hidden()).problems[0]
    assert "not a torch.nn.Module" in check_structure(lambda x: x).problems[0]
    assert check_structure(Hidden()).status == "failed"


def test_structure_refuses_outputs_that_are_no_tensors() -> None:
    model, found = Chatty(), check_structure(Chatty())
    check_calls(model, batches(1)[0], found, plain_config())
    assert found.status == "failed"
    (problem,) = found.problems
    assert "'kinds'" in problem
    assert "set" in problem
    assert [one.name for one in found.outputs] == ["logits", "more.0", "more.1.0"]


class EveryDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.memory = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.drops = nn.Sequential(
            nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(x, x, x)
        x, _ = self.memory(self.drops(x))
        x = functional.scaled_dot_product_attention(x, x, x, None, 0.5)
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return self.norm(torch.dropout(functional.dropout(x, p=0.5), 0.5, True).flatten(0, 1))


def test_dropout_is_off_and_everything_else_in_train_mode() -> None:
    torch.manual_seed(0)
    model, x = EveryDropout(), torch.rand(4, 5, 8)
    assert not torch.equal(model(x), model(x))
    with Reference() as reference:
        first, second = model(x), model(x)
    assert reference.dropped
    torch.testing.assert_close(first, second)
    # BatchNorm took its statistics from the batch.
    torch.testing.assert_close(first.mean(0), torch.zeros(8), atol=1e-4, rtol=0)
    with Reference() as none:
        Net()(torch.rand(2, 8))
    assert not none.dropped
