"""What is evaluated, between real processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.data.holdout import HeldOut
from ortlaunch.models.items import samples
from ortlaunch.models.task import make_task
from ortlaunch.trainer.evaluation import Evaluation, no_scores
from ortlaunch.trainer.hooks import Hook
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap_trainer
from tests.support.two import in_two

KINDS = {
    "ddp": ["trainer=ddp"],
    "fsdp-bf16": ["trainer=fsdp", "backend=eager", "train.precision=bf16"],
    "zero0": ["trainer=deepspeed", "trainer.zero_stage=0"],
    "zero3-bf16": ["trainer=deepspeed", "trainer.zero_stage=3", "train.precision=bf16"],
}


def worker(rank: int, folder: str) -> None:
    """Evaluates under each trainer."""
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed asks for it.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({kind: evaluated(rank, words) for kind, words in KINDS.items()}, f"{folder}/rank-{rank}.pt")
    # As a run's worker ends: gloo's threads may abort a process that destroys the group while they still work.
    os._exit(0)


def evaluated(rank: int, words: list[str]) -> tuple[torch.Tensor, ...]:
    """After a step on images of its own: the running means before, in and after an evaluation, and its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    batch = {"pixel_values": torch.rand(8, 1, 8, 8), "labels": torch.arange(8)}
    config = to_config(compose(["model=mlp", "device=cpu", *words]))
    workers = Workers(rank, 2, torch.device("cpu"), threads=1)
    engine = wrap_trainer(model, config, workers, make_task(model, batch))
    engine.micro_step({**batch, "pixel_values": batch["pixel_values"] * (1 + rank)}, last=True)
    engine.step()
    mine = model[1].running_mean.clone()
    with engine.evaluating():
        loss = engine.evaluate(batch).loss
        evaluated = model[1].running_mean.clone()
    return mine, evaluated, model[1].running_mean.clone(), loss


def test_all_workers_evaluate_the_model_that_is_saved(tmp_path: Path) -> None:
    """Each one's last batch has moved statistics of its own; a checkpoint has the first worker's."""
    in_two(worker, str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    for kind in KINDS:
        (first, of_first, first_after, loss), (second, of_second, second_after, other) = (
            found[kind] for found in ranks
        )
        assert not torch.equal(first, second), kind
        assert torch.equal(of_first, first), kind
        assert torch.equal(of_second, first), kind
        # Training goes on as if there had been no evaluation. DDP sends the first worker's before a step anyway.
        assert torch.equal(first_after, first), kind
        assert torch.equal(second_after, first if kind == "ddp" else second), kind
        assert torch.equal(loss, other), kind


def test_a_module_that_is_kept_in_evaluation_mode_stays_so() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    model[1].eval()
    batch = {"pixel_values": torch.rand(8, 1, 8, 8), "labels": torch.arange(8)}
    config = to_config(compose(["model=mlp", "device=cpu", "trainer=single", "backend=eager"]))
    workers = Workers(0, 1, torch.device("cpu"), threads=1)
    engine = wrap_trainer(model, config, workers, make_task(model, batch))
    before = [module.training for module in model.modules()]
    with engine.evaluating():
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before == [True, True, False, True]


class Normalizes(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        pixel_values *= 2
        return self.linear(pixel_values.flatten(1))


class Heard:
    """Takes what is recorded."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["eval/loss"])


def test_each_evaluation_leaves_a_batch_as_it_is() -> None:
    torch.manual_seed(0)
    model, batch = Normalizes(), {"pixel_values": torch.rand(8, 1, 8, 8), "labels": torch.arange(8)}
    before = batch["pixel_values"].clone()
    config = to_config(compose(["model=mlp", "device=cpu", "trainer=single", "backend=eager"]))
    workers = Workers(0, 1, torch.device("cpu"), threads=1)
    task = make_task(model, batch)
    engine = wrap_trainer(model, config, workers, task)
    heard = Heard()
    evaluation = Evaluation([HeldOut(batch, 4)], samples, 1, 2, workers, heard, Hook(), *no_scores())  # type: ignore[arg-type]
    for step in (1, 2):
        evaluation.run(engine, step)
    assert heard.losses[0] == heard.losses[1]
    assert torch.equal(batch["pixel_values"], before)
