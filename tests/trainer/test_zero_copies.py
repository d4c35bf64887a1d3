"""ZeRO 1 on the CPU: the numbers are those of DeepSpeed's own way, with fewer copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.trainer.engines.deepspeed_engine import DeepSpeedEngine
from ortlaunch.trainer.engines.zero_copies import _take_large_pages, joined
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap
from tests.support.alone import alone

ELEMENTS = 19_210
"""Weights of the model."""
OWN = (
    "+trainer.config.zero_optimization.reduce_scatter=true",
    f"+trainer.config.zero_optimization.reduce_bucket_size={ELEMENTS - 1}",
    "+trainer.config.prescale_gradients=false",
)
"""With two buckets, a gradient has to be copied out of the first one."""
BATCH = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}
WORKERS = Workers(0, 1, torch.device("cpu"), 2)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A real group of one worker, so that DeepSpeed can be built."""
    with alone():
        yield


class Copied(TorchDispatchMode):
    """Counts the elements that operators copy."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "cat", "clone"):
            self.elements[name] += result.numel()
        return result


def engine_of(folder: Path, *words: str) -> DeepSpeedEngine:
    torch.manual_seed(0)
    config = to_config(compose(["device=cpu", "model=mlp", "backend=eager", "trainer=deepspeed", *words]))
    model = build_model(config.model)
    engine = wrap(model, config, WORKERS, make_task(model, BATCH), folder)
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def trained(engine: DeepSpeedEngine, steps: int) -> list[Tensor]:
    """The weights after some steps, and the norm of the last one's gradients."""
    norm: Any = None
    for _ in range(steps):
        engine.micro_step(BATCH, last=True)
        norm = engine.step()
    return [*(one.detach().clone() for one in engine.inner.parameters()), torch.as_tensor(norm)]


def test_a_gradient_is_copied_once_and_a_weight_once(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    trained(engine, 2)
    with Copied() as copied:
        trained(engine, 1)
    small = ELEMENTS // 100
    # The weights that `trained` returns are the clones.
    assert copied.elements["clone"] <= ELEMENTS + small
    # A gradient into the bucket, and the optimizer's weight into the model.
    assert copied.elements["copy_"] <= 2 * ELEMENTS + small
    assert copied.elements["cat"] <= small


@pytest.mark.parametrize("clip", ["1.0e-3", "100", "null"])
def test_the_numbers_are_those_of_deepspeeds_own_way(clip: str, tmp_path: Path) -> None:
    words = (f"train.clip_grad_norm={clip}", "optimizer.weight_decay=0.5")
    ours, own = (trained(engine_of(tmp_path, *words, *more), 4) for more in ((), OWN))
    assert all(torch.equal(*pair) for pair in zip(ours, own, strict=True))


def test_the_bucket_is_as_large_as_the_gradients(tmp_path: Path) -> None:
    """By default DeepSpeed makes one of two gigabytes in every step."""
    for stage in (1, 2):
        assert engine_of(tmp_path, f"trainer.zero_stage={stage}")._engine.optimizer.reduce_bucket_size == ELEMENTS


def test_weights_that_were_moved_are_put_back_by_the_next_step(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    trained(engine, 1)
    weight = next(engine.inner.parameters())
    before = weight.detach().clone()
    weight.data = before.clone()
    trained(engine, 1)
    assert not torch.equal(weight, before)
    flat = engine._engine.optimizer.bit16_groups_flat[0]
    assert weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_tensors_are_joined_where_they_follow_each_other() -> None:
    memory = torch.arange(12.0)
    view = joined([memory[2:4], memory[4:10].view(2, 3)])
    assert view is not None
    assert torch.equal(view, memory[2:10])
    assert view.data_ptr() == memory[2:].data_ptr()
    for others in ([memory[2:4], memory[5:6]], [memory[4:6], memory[2:4]], [memory[0:2], memory[2:4].clone()]):
        assert joined(others) is None
    assert joined([memory[0:6].view(2, 3).t(), memory[6:8]]) is None


def test_a_large_bucket_is_to_have_large_pages() -> None:
    memory = torch.arange(10_000_000)
    if _flags(memory) is None:
        pytest.skip("this kernel does not tell a mapping's flags")
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no large pages")
    _take_large_pages(memory)
    flags = _flags(memory)
    assert flags is not None
    assert "hg" in flags
    assert torch.equal(memory, torch.arange(10_000_000))


def _flags(memory: Tensor) -> list[str] | None:
    """What the kernel says of the mapping of a tensor's middle; None if it says nothing."""
    middle, inside = memory.data_ptr() + memory.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(bound, 16) for bound in name.split("-"))
            inside = begin <= middle < end
        elif inside and name == "VmFlags:":
            return rest.split()
    return None
