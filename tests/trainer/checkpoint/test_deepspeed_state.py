"""What ortlaunch makes DeepSpeed save, against what DeepSpeed saves by itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Task
from ortlaunch.trainer.checkpoint import deepspeed_state
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap_trainer
from tests.support.alone import alone


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A real group of one worker."""
    with alone():
        yield


def plain(tree: Any) -> Any:
    """The content without DeepSpeed's own classes, and with lists in place of tensors."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.tolist()
    if isinstance(tree, dict):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return tree if isinstance(tree, bool | int | float | str | None) else type(tree).__name__


def test_what_every_worker_keeps_whole_stays_where_it_is_under_zero_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen parameter and a buffer are among it: the files are DeepSpeed's, and nothing is gathered again."""
    config = to_config(
        compose(["model=mlp", "device=cpu", "backend=eager", "trainer=deepspeed", "trainer.zero_stage=3"])
    )
    model = build_model(config.model)
    model.register_buffer("seen", torch.arange(3.0))
    next(model.parameters()).requires_grad_(False)
    ours: Any = wrap_trainer(model, config, Workers(0, 1, torch.device("cpu"), 1), Task(("x",)))
    engine, group = ours._engine, dist.distributed_c10d._get_default_group()
    gathered: list[int] = []
    usual = engine.optimizer.checkpoint_event_epilogue
    usual()  # As after a step.
    whole = [parameter for parameter in model.parameters() if parameter.numel()]
    assert whole, "no parameter is whole between steps"
    kept = [parameter.data_ptr() for parameter in whole]

    def gather() -> None:
        gathered.append(1)
        usual()

    monkeypatch.setattr(engine.optimizer, "checkpoint_event_epilogue", gather)
    for who in ("ours", "deepspeeds"):
        (tmp_path / who).mkdir()
    memory = HostMemory()
    with memory.copying(keep=False):
        write = deepspeed_state.snapshot(engine, tmp_path / "ours", trained_only=False, shared=False, memory=memory)
        copies = [weakref.ref(copied) for copied in memory._taken]
    assert copies and all(copied() is not None for copied in copies)
    write(group)
    assert all(copied() is None for copied in copies), "they are let go before the other workers have written"
    assert [parameter.data_ptr() for parameter in whole] == kept
    assert not gathered
    monkeypatch.setattr(deepspeed_state, "_left_gathered", lambda _engine: contextlib.nullcontext())
    deepspeed_state.snapshot(engine, tmp_path / "deepspeeds", trained_only=False, shared=False, memory=HostMemory())(
        group
    )
    assert gathered
    files, deepspeeds = (
        {file.name: plain(torch.load(file, weights_only=False)) for file in sorted((tmp_path / who).rglob("*.pt"))}
        for who in ("ours", "deepspeeds")
    )
    assert len(files) == 2
    assert files == deepspeeds


def test_a_conversion_that_fails_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    """The snapshot lacks its files, so DeepSpeed's program fails."""
    scratch, group = tmp_path / ".universal", dist.distributed_c10d._get_default_group()
    engine = SimpleNamespace(zero_optimization=lambda: True)
    for theirs in (None, scratch / "mine.txt"):
        if theirs is not None:
            scratch.mkdir()
            theirs.write_text("kept")
        with pytest.raises(Exception, match=r"absent|empty|Zero|checkpoint"):
            deepspeed_state.restore(
                engine, tmp_path / "absent", saved_workers=2, scratch=scratch, group=group, trained_only=False
            )
        assert list(tmp_path.rglob("*")) == ([] if theirs is None else [scratch, theirs])
