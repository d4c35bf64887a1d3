"""Values of weights and buffers that reach a graph unseen: a run trains as eager does, or is refused at its start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import BackendConfig, Config, EagerConfig, ModelConfig, OrtConfig, TrainConfig
from ortlaunch.config.trainers.single import SingleConfig
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort import session
from ortlaunch.trainer.backend_run import backend_run
from ortlaunch.trainer.optimizers.sgd import SgdConfig
from ortlaunch.trainer.schedules.constant import ConstantConfig
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap
from tests.ort import unseen_values as nets

STEPS = 20

TRAIN = [
    nets.Pruned,
    nets.Quantized,
    nets.Normed,
    nets.Spectral,
    nets.WeighedLoss,
    nets.DeepCopied,
    nets.DataOfInput,
    nets.ClampedActivation,
    nets.AveragedThroughData,
]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(12, 8, generator=generator), "labels": torch.randint(3, (12,), generator=generator)}
        for _ in range(STEPS)
    ]


def losses(kind: type[nets.Net], backend: BackendConfig, folder: Path) -> list[float]:
    """Trains a net as a run does, from the check at its start on."""
    config = Config(
        model=ModelConfig(name="factory"),
        backend=backend,
        trainer=SingleConfig(),
        train=TrainConfig(steps=STEPS, batch_size=12, clip_grad_norm=None),
        optimizer=SgdConfig(lr=0.3, momentum=0.9),
        scheduler=ConstantConfig(),
    )
    workers, data = Workers(0, 1, torch.device("cpu"), 1), batches()
    seed_everything(1)
    model = kind().train()
    task = make_task(model, data[0])
    engine = wrap(model, config, workers, task, folder)
    run = backend_run(engine, config, workers, folder, None)
    before = [weight.detach().clone() for weight in model.parameters()]
    try:
        run.check(task, data[: 1 + run.check_batches])
    except RequestError as error:
        raise RefusedAtStart(str(error)) from error
    assert all(map(torch.equal, before, model.parameters()))
    found = []
    for step, batch in enumerate(data, 1):
        engine.guard.step = step
        run.recheck(step, batch)
        found.append(float(engine.micro_step(batch, last=True)))
        run.check_decisions(batch)
        engine.step()
    assert session.is_active(engine.inner) is isinstance(backend, OrtConfig)
    run.close()
    return found


class RefusedAtStart(Exception):
    """A run would not begin."""


@pytest.mark.parametrize("kind", TRAIN)
def test_what_a_graph_can_follow_trains_as_in_eager(kind: type[nets.Net], tmp_path: Path) -> None:
    eager = losses(kind, EagerConfig(), tmp_path)
    assert losses(kind, OrtConfig(export_cache=False), tmp_path) == pytest.approx(eager, abs=1e-5)
