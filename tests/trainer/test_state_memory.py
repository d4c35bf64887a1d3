"""The sum of weights, gradients and optimizer state: beside what torch holds, and what is said where it is too much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.config.trainers import trainer_of
from ortlaunch.config.trainers.base import Weights
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.trainer.state_memory import Room, judged, weights_of
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap

GIB = 2**30
MODEL = Weights(buffers=0, parameters=GIB, trained=GIB, optimizer=2 * GIB, low_share=1.0)


def config_of(*words: str) -> Config:
    return to_config(compose(["model=mlp", "backend=eager", "tracking=none", "device=cpu", *words]))


def told(trainer: str, gib: float, *words: str, workers: int = 2, on_gpu: bool = False) -> str:
    config = config_of(f"trainer={trainer}", f"launcher.workers_per_node={workers}", *words)
    return judged(config, MODEL, Room(int(gib * GIB), workers, config.launcher.nodes, on_gpu))[1]


@pytest.mark.parametrize(
    "words", [["adamw"], ["sgd"], ["sgd", "optimizer.momentum=0"], ["adafactor"]], ids=lambda words: " ".join(words)
)
@pytest.mark.parametrize("frozen", [False, True])
def test_each_optimizer_holds_what_is_summed_up(words: list[str], frozen: bool, tmp_path: Path) -> None:
    config = config_of("trainer=single", f"optimizer={words[0]}", *words[1:])
    model = build_model(config.model)
    first = next(model.parameters())
    first.requires_grad_(not frozen)
    model.register_buffer("mean", torch.zeros(1000))
    weights = weights_of(model, config.optimizer, config.train.precision)
    batch = {"pixel_values": torch.ones(2, 1, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    engine = wrap(model, config, Workers(0, 1, torch.device("cpu"), 1), make_task(model, batch), tmp_path)
    engine.micro_step(batch, last=True)
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    engine.step()
    states = [one for state in engine._optimizer.state.values() for one in state.values()]  # type: ignore[attr-defined]
    # Counters of steps, and Adafactor's variance of vectors, are there beside.
    held += [one for one in states if isinstance(one, torch.Tensor) and one.numel() > 1]
    assert sum(one.nbytes for one in held) == trainer_of(config.trainer).state_bytes(config.trainer, weights, 1)


def test_a_state_that_fits_says_nothing() -> None:
    assert told("ddp", 8) == ""
    # Two workers share a machine; each has a GPU for itself.
    assert told("ddp", 7.9) != ""
    assert told("ddp", 4, on_gpu=True) == ""
    assert told("fsdp", 4) == told("deepspeed", 7, "trainer.zero_stage=1") == ""
    # On the GPU are the weights alone.
    assert told("deepspeed", 1, "trainer.zero_stage=2", "trainer.offload_optimizer=true", on_gpu=True) == ""


def test_of_a_gpu_the_optimizer_may_leave() -> None:
    assert "trainer=deepspeed trainer.zero_stage=2 fits" in told("ddp", 3, on_gpu=True)
    alone = told("single", 3, workers=1, on_gpu=True)
    assert "trainer=deepspeed trainer.zero_stage=2 trainer.offload_optimizer=true fits" in alone
    assert "3.00 GiB are free (its GPU)" in alone


@pytest.mark.parametrize(
    ("gib", "words", "change"),
    [
        (6.0, ["ddp"], "trainer=single launcher.workers_per_node=1 train.grad_accumulation=2 fits"),
        (3.5, ["ddp", "launcher.nodes=2"], "By this sum trainer=deepspeed trainer.zero_stage=3 fits"),
        (3.0, ["ddp"], "none of a smaller micro-batch, activation checkpointing, fewer workers and ZeRO is enough"),
        (6.0, ["deepspeed"], "By this sum launcher.workers_per_node=1 train.grad_accumulation=2 fits"),
        (3.0, ["single"], "none of a smaller micro-batch and activation checkpointing is enough"),
    ],
)
def test_the_nearest_change_that_fits_is_named(gib: float, words: list[str], change: str) -> None:
    line = told(words[0], gib, *words[1:], workers=1 if words == ["single"] else 2)
    assert change in line
    assert "ortlaunch estimate" in line and "train.memory_check=off" in line
