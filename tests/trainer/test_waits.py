"""A training step, as engines take it on CUDA, does not make the host wait; DeepSpeed's own step does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.trainer.engines import zero_copies
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap_trainer
from tests.support.alone import alone
from tests.support.waits import Waits

WORKERS = Workers(0, 1, torch.device("cpu"), 1)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with alone():
        yield


def waits_of(*words: str) -> Counter[str]:
    """Those of the third step and of an evaluation, with what an engine does on the CPU alone switched off."""
    config = to_config(compose(["device=cpu", "model=mlp", "backend=eager", *words]))
    batch = {"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.tensor([1, 2])}
    model = build_model(config.model)
    engine: Any = wrap_trainer(model, config, WORKERS, make_task(model, batch))
    # On the CPU the host may read each step's numbers, and torch's fused kernel takes the flag there too.
    engine.guard.reads_values = False
    engine._masks_on_device = True
    for step in range(1, 4):
        engine.guard.step = step
        with Waits() as seen:
            engine.micro_step(dict(batch), last=True)
            engine.step()
    with Waits() as evaluated, engine.evaluating():
        engine.evaluate(dict(batch))
    return seen.lines + evaluated.lines


# DDP's reducer reads a number of its own at each gradient, in the host's memory, which looks like a wait here. Its step
# is that of trainer=single, and tests/gpu counts real waits.
@pytest.mark.parametrize("trainer", ["single", "fsdp", "deepspeed"])
def test_a_step_and_an_evaluation_make_the_host_wait_for_nothing(trainer: str) -> None:
    stage = ("trainer.zero_stage=0",) if trainer == "deepspeed" else ()
    assert not waits_of(f"trainer={trainer}", *stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_only_deepspeed_itself_waits_where_it_shards(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides on the host whether to step; a wait of ours or of the model would have another module."""
    # What is for the CPU alone.
    monkeypatch.setattr(zero_copies, "options", lambda *_, **__: ({}, {}))
    monkeypatch.setattr(zero_copies, "spare_copies", lambda *_, **__: None)
    lines = waits_of("trainer=deepspeed", f"trainer.zero_stage={stage}")
    assert lines
    assert all(line.startswith("deepspeed.") for line in lines)
