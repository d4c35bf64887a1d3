"""Values of weights and buffers that reach a graph unseen: a run trains as eager does, or is refused at its start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import BackendConfig, Config, EagerConfig, ModelConfig, OrtConfig, TrainConfig
from ortlaunch.config.trainers.single import SingleConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.ort.verify.moved_weights import moved_weights
from ortlaunch.trainer.backend_run import backend_run
from ortlaunch.trainer.optimizers import SgdConfig
from ortlaunch.trainer.schedules import ConstantConfig
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap
from tests.ort import unseen_values as nets
from tests.support.nightly import first_in_ci

STEPS = 20

TRAIN = [
    nets.Pruned,
    nets.Spectral,
    nets.DeepCopied,
    nets.AveragedThroughData,
    nets.AliasOfArray,
    nets.AveragedByAssignment,
    nets.Counted,
    nets.Quantized,
    nets.Normed,
    nets.WeighedLoss,
    nets.DataOfInput,
    nets.ClampedActivation,
    nets.Alias,
    nets.PrunedByAlias,
    nets.QuantizedByAlias,
    nets.AssignedActivation,
    nets.SpectralData,
    nets.Penalized,
    nets.RecurrentOnASlice,
    nets.VectorQuantized,
    nets.ShiftedBank,
]
REFUSED = {
    nets.OnlyInGradients: r"the gradient of a.weight differs by .*see `return hidden.detach\(\) .*:\d+",
    nets.GateByList: r"`return hidden \* \(1 \+ self.gate\)",
    nets.Queue: r"the buffer \w+ .* `at, count = int\(self.at\), len\(x\)`",
    nets.FirstBatch: "see `if self.initialised == 0:`",
    nets.Codebook: "see `if not self.made:`",
    nets.CumulativeMean: "see `count = int",
    nets.Schedule: r"see `factor = min\(1.0, self.step.item",
    nets.DroppingQueue: r"the buffer \w+ .* `at, count = int\(self.at\), len\(x\)`",
    nets.PrunedByList: r"see `return \(torch.tensor\(self.a.weight.tolist",
    nets.Listed: "see `return self.a.weight",
    nets.Array: r"see `return self.a.weight \* torch.from_numpy\(abs",
    nets.Item: "see `return self.a.weight / self.a.weight.norm",
    nets.CopiedInForward: "state_dict changed",
    nets.Stored: "cannot train this model",
    nets.ClampedResult: "the gradient of a.weight differs by",
    nets.Teacher: "changes the parameter teacher.weight",
}
LATER = {
    nets.EveryFourthWrites: (4, r"int\(self.count\).* reads 3 in this step.* the buffer kept"),
    nets.RareTruth: (16, "reads True in this step"),
    nets.EveryFourth: (4, r"int\(self.count\).* reads 3 in this step.* the gradient of"),
    nets.SlowSchedule: (4, "reads 3.0 in this step"),
}
"""The steps that stop the run, by what they say: values that decide nothing in the run's first three batches."""


def batches(sizes: Sequence[int] = ()) -> list[Batch]:
    """Batches of 12 rows, of which the first ones are cut to some sizes."""
    generator = torch.Generator().manual_seed(5)
    whole = [
        {"x": torch.randn(12, 8, generator=generator), "labels": torch.randint(3, (12,), generator=generator)}
        for _ in range(STEPS)
    ]
    cut = [{name: one[:size] for name, one in batch.items()} for batch, size in zip(whole, sizes, strict=False)]
    return [*cut, *whole[len(cut) :]]


class Course:
    """A run of a net, from the check at its start on."""

    def __init__(self, kind: type[nets.Net], backend: BackendConfig, folder: Path, sizes: Sequence[int] = ()) -> None:
        config = Config(
            model=ModelConfig(name="factory"),
            backend=backend,
            trainer=SingleConfig(),
            train=TrainConfig(steps=STEPS, batch_size=12, clip_grad_norm=None),
            optimizer=SgdConfig(lr=0.3, momentum=0.9),
            scheduler=ConstantConfig(),
        )
        workers, self._batches = Workers(0, 1, torch.device("cpu"), 1), batches(sizes)
        seed_everything(1)
        self.model = kind().train()
        task = make_task(self.model, self._batches[0])
        self.engine = wrap(self.model, config, workers, task, folder)
        self._run = backend_run(self.engine, config, workers, folder, None)
        self._run.check(task, self._batches[: 1 + self._run.check_batches])

    def losses(self) -> Iterator[float]:
        """Trains on, step by step."""
        for step, batch in enumerate(self._batches, 1):
            self.engine.guard.step = step
            self._run.micro_batch_begins(step, 0, batch)
            loss = self.engine.micro_step(batch, last=True).loss
            self._run.micro_batch_ends(batch)
            yield float(loss)
            self.engine.step()
        self._run.close()

    def evaluated(self) -> Iterator[float]:
        """Evaluates each batch."""
        with self.engine.evaluating():
            for batch in self._batches:
                self._run.evaluates(batch)
                yield float(self.engine.evaluate(batch).loss)
                self._run.evaluated(batch)


ORT = OrtConfig(export_cache=False)


@pytest.mark.parametrize("kind", first_in_ci(TRAIN, 6))
def test_what_a_graph_can_follow_trains_as_in_eager(kind: type[nets.Net], tmp_path: Path) -> None:
    course = Course(kind, ORT, tmp_path)
    assert session.is_active(course.engine.inner)
    assert list(course.losses()) == pytest.approx(list(Course(kind, EagerConfig(), tmp_path).losses()), abs=1e-5)


@pytest.mark.parametrize("kind", first_in_ci(REFUSED, 6))
def test_what_would_stay_that_of_the_trace_is_refused_at_the_start(kind: type[nets.Net], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=REFUSED[kind]):
        Course(kind, ORT, tmp_path)
    assert len(list(Course(kind, EagerConfig(), tmp_path).losses())) == STEPS


@pytest.mark.parametrize("kind", first_in_ci(LATER, 2))
def test_what_decides_later_stops_the_step_in_which_it_does(kind: type[nets.Net], tmp_path: Path) -> None:
    step, words = LATER[kind]
    losses = Course(kind, ORT, tmp_path).losses()
    for _ in range(step - 1):
        next(losses)
    with pytest.raises(RequestError, match=words):
        next(losses)


@pytest.mark.parametrize("kind", first_in_ci(nets.BY_SIZE, 3))
def test_a_net_that_goes_by_the_size_of_the_batch_trains_and_evaluates_as_in_eager(
    kind: type[nets.Net], tmp_path: Path
) -> None:
    sizes = (12, 12, 12, 7, 12, 5, 7)
    courses = [Course(kind, backend, tmp_path, sizes) for backend in (ORT, EagerConfig())]
    assert session.is_active(courses[0].engine.inner)
    evaluated, expected = (list(course.evaluated()) for course in courses)
    assert evaluated == pytest.approx(expected, abs=1e-5)
    losses, expected = (list(course.losses()) for course in courses)
    assert losses == pytest.approx(expected, abs=1e-5)


def test_the_first_batches_of_a_run_may_have_sizes_by_which_a_net_goes(tmp_path: Path) -> None:
    losses, expected = (
        list(Course(nets.LoopOverRows, backend, tmp_path, (12, 5, 12, 5)).losses()) for backend in (ORT, EagerConfig())
    )
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", first_in_ci([kind for kind in REFUSED if kind is not nets.CopiedInForward], 3))
def test_a_graph_for_each_size_hides_no_value_that_stays_that_of_the_trace(
    kind: type[nets.Net], tmp_path: Path
) -> None:
    with pytest.raises(RequestError):
        Course(kind, ORT, tmp_path, (12, 7, 5))


def test_the_check_moves_weights_and_puts_them_back_to_the_bit() -> None:
    special = [0.0, -0.0, 2**-6, 2**-5, -(2**-6), 1.25 * 2**-5, 1.125 * 2**-6, 1.0, -1e-40, 3.4]
    weights = [torch.tensor(special), torch.zeros(3, 5), torch.randn(40, 30).t(), torch.randn(6, 8)[:, :5]]
    weights += [torch.tensor(3.0), torch.zeros(0), torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)]
    weights += [torch.randn(9, 3, dtype=torch.float64)]
    model = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.append(frozen)
    with moved_weights(model):
        for before, weight in zip(weights[1:5], list(model)[1:5], strict=True):
            assert ((weight - before).abs() > 0.01 * before.abs()).all()
        assert torch.equal(frozen, torch.ones(2))
    for before, weight in zip(weights, model, strict=False):
        assert before.numpy().tobytes() == weight.detach().numpy().tobytes()


@pytest.mark.parametrize("kind", [nets.Strict, nets.Bounded])
def test_a_net_that_is_another_one_with_other_weights_is_compared_with_its_own(
    kind: type[nets.Net], tmp_path: Path
) -> None:
    assert next(Course(kind, ORT, tmp_path).losses()) > 0
