"""Checkpoints beside further steps: what is written is the state of their step, from memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.run.checkpoints import Store, name_of
from ortlaunch.trainer.checkpoint import torch_state
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.checkpoint.saver import ENGINE, Saver
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap_trainer
from tests.support.alone import alone

BATCH = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.arange(4)}
KINDS = {
    "ddp": ["trainer=ddp"],
    "fsdp": ["trainer=fsdp"],
    "zero1": ["trainer=deepspeed", "trainer.zero_stage=1"],
    "zero3": ["trainer=deepspeed", "trainer.zero_stage=3"],
}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A real group of one worker."""
    with alone():
        yield


class LateWriter:
    """An engine's snapshots, each of which is written when its gate is open."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gates: list[threading.Event] = []

    def snapshot(self, folder: Path, *, shared: bool, memory: HostMemory) -> Write:
        write = self._engine.snapshot(folder, shared=shared, memory=memory)
        gate = threading.Event()
        self.gates.append(gate)

        def later(group: dist.ProcessGroup) -> None:
            assert gate.wait(200)
            write(group)

        return later


def engine_of(words: list[str]) -> Engine:
    config = to_config(compose(["model=mlp", "device=cpu", "backend=eager", *words]))
    model = build_model(config.model)
    return wrap_trainer(model, config, Workers(0, 1, torch.device("cpu"), 1), make_task(model, BATCH))


def train(engine: Engine) -> None:
    engine.micro_step(BATCH, last=True)
    engine.step()


def content(folder: Path) -> list[tuple[str, list[Any]]]:
    """The tensors of a written engine state, by file or by name."""
    if (folder / "tensors").is_dir():
        return [(name, value.tolist()) for name, value in sorted(torch_state.read_tensors(folder, None).items())]
    files = {path.name: torch.load(path, weights_only=False) for path in sorted(folder.rglob("*.pt"))}
    return [(name, [one.tolist() for one in tensors_in(tree)]) for name, tree in files.items()]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(one)


def places(saver: Saver) -> set[int]:
    """Where the memory is that is kept for the next checkpoint."""
    kept = [one for free in saver._memory._free.values() for one in free]
    return {one.data_ptr() for one in kept if type(one) is torch.Tensor and one.numel()} | {
        one.to_local().data_ptr() for one in kept if type(one) is not torch.Tensor
    }


@pytest.mark.parametrize("words", KINDS.values(), ids=KINDS)
def test_a_copy_is_overwritten_by_the_next_one_when_it_is_written_and_not_before(
    tmp_path: Path, words: list[str]
) -> None:
    group, engine = dist.distributed_c10d._get_default_group(), engine_of(words)
    late = LateWriter(engine)
    saver = Saver(Store(tmp_path / "checkpoints", 9), Workers(0, 1, torch.device("cpu"), 1), group)
    found, kept = [], []
    # A failed checkpoint's memory is used again, too. The last two are the last copy, and the state itself.
    for step, refusal in enumerate(["", "", "a loss was not finite", "", ""], 1):
        train(engine)
        reference = tmp_path / f"reference-{step}" / ENGINE
        reference.mkdir(parents=True)
        engine.snapshot(reference, shared=True, memory=HostMemory())(group)
        if late.gates:
            # The checkpoint before begins to be written while this one waits for it.
            threading.Timer(0.1, late.gates[-1].set).start()
        found += saver.save(step, late.snapshot, {}, {"step": step}, refusal, shared=step == 5, keep_memory=step < 4)
        kept.append(places(saver))
    late.gates[-1].set()
    found += saver.wait()
    assert [one.error for one in found] == ["", "", "rank 0: a loss was not finite", "", ""]
    assert kept[0]
    assert kept == [kept[0]] * 3 + [set(), set()]
    written = {step: content(tmp_path / "checkpoints" / name_of(step) / ENGINE) for step in (1, 2, 4, 5)}
    assert written == {step: content(tmp_path / f"reference-{step}" / ENGINE) for step in written}
    assert written[1] != written[2]
