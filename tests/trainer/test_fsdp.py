"""What FSDP shards of a model: its blocks one by one, and by the root what they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.task import Task
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap_trainer

BATCH = {"x": torch.ones(2, 4), "labels": torch.zeros(2, 4)}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A real group of one worker."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


def engine_of(model: nn.Module, *words: str) -> Engine:
    config = to_config(compose(["model=mlp", "device=cpu", "backend=eager", "trainer=fsdp", *words]))
    return wrap_trainer(model, config, Workers(0, 1, torch.device("cpu"), 1), Task(("x",)))


def sharded(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_each_block_is_sharded_by_itself_and_the_rest_by_the_root() -> None:
    model = Tower()
    engine_of(model)
    assert sharded(model) == ["", "steps.0", "steps.1", "steps.2", "steps.3"]
    model = Tower()
    engine_of(model, "trainer.blocks='steps.[12]'")
    assert sharded(model) == ["", "steps.1", "steps.2"]


def test_a_model_without_blocks_is_sharded_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    engine_of(model)
    assert sharded(model) == [""]


def test_blocks_that_share_a_weight_are_left_to_the_root() -> None:
    """torch refuses to shard one parameter in two groups."""
    model = Tower()
    model.steps[1].weight = model.steps[2].weight
    engine = engine_of(model)
    assert sharded(model) == ["", "steps.0", "steps.3"]
    before = engine.weights()
    assert before["steps.1.weight"] is before["steps.2.weight"]
    engine.micro_step(BATCH, last=True)
    engine.step()
    after = engine.weights()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_name_that_matches_no_block_is_refused_with_the_key() -> None:
    with pytest.raises(RequestError, match=r"trainer\.blocks=Stpe: matches no module .*Linear"):
        engine_of(Tower(), "trainer.blocks=Stpe")


def test_what_evaluation_gathered_is_freed() -> None:
    engine = engine_of(Tower(), "trainer.reshard_after_forward=false")
    with engine.evaluating():
        engine.evaluate(BATCH)
        gathered = [type(parameter).__name__ for parameter in engine.inner.parameters()]
    assert "DTensor" not in gathered
    assert {type(parameter).__name__ for parameter in engine.inner.parameters()} == {"DTensor"}
