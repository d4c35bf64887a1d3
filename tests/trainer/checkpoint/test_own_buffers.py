"""Buffers beside an engine's state: which are saved, and what becomes of them in a model that was built anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.trainer.checkpoint import resume
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.checkpoint.own_buffers import OwnBuffers, Saved, differing, digest
from ortlaunch.trainer.workers import Workers


class Keeps(nn.Module):
    """Forward moves one buffer, lets one grow, replaces one, and registers one."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("seen", torch.zeros(size, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("mask", torch.ones(1).expand(4), persistent=False)
        self.register_buffer("bank", torch.zeros(0, 2), persistent=False)
        self.register_buffer("last", None, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("links", torch.eye(2).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> None:
        self.inner.seen += 1
        self.bank = torch.cat([self.bank, x])
        self.last = x[0].clone()
        self.count += 1
        if not hasattr(self, "late"):
            self.register_buffer("late", x.sum(0))


def built(size: int = 3) -> tuple[Keeps, OwnBuffers]:
    model = Keeps(size)
    return model, OwnBuffers(model, model.state_dict())


def saved_of(own: OwnBuffers) -> Saved:
    copied = own.copied(all_of_them=False, shared=False, memory=HostMemory())
    return own.changed(copied, {name: digest(one["value"]) for name, one in copied.items()})


def values(model: nn.Module) -> dict[str, Any]:
    return {name: (value.dtype, value.tolist()) for name, value in model.named_buffers() if not value.is_sparse}


def test_a_model_that_has_not_trained_saves_nothing() -> None:
    assert saved_of(built()[1]) == {}


def test_what_forward_has_changed_is_loaded_into_a_new_model() -> None:
    model, own = built()
    model(torch.ones(2, 2))
    saved = saved_of(own)
    assert saved.keys() == {"inner.seen", "bank", "last", "late"}
    model(torch.ones(2, 2))
    assert saved["inner.seen"]["value"].tolist() == [1, 1, 1], "the copy has moved with the model"
    other, others = built()
    resume.check_buffers(resume.Start(Path("here"), buffers=saved), others.shapes)
    seen = other.inner.seen
    others.load(saved)
    assert other.inner.seen is seen, "a graph may hold the tensor"
    other(torch.ones(2, 2))
    expected = values(model)
    assert values(other) == {**expected, "count": (torch.int64, 1)}
    assert other.state_dict().keys() == model.state_dict().keys()


def test_a_buffer_of_another_size_is_refused() -> None:
    model, own = built()
    model(torch.ones(2, 2))
    _, others = built(size=4)
    with pytest.raises(
        RequestError, match=r"here is of another model:\nother shape: inner\.seen: \(3,\) there, \(4,\)"
    ):
        resume.check_buffers(resume.Start(Path("here"), buffers=saved_of(own)), others.shapes)


def test_a_pass_before_training_leaves_nothing_behind() -> None:
    model, own = built()
    with own.kept():
        model.inner.seen += 1
        model.bank = torch.ones(3, 2)
    assert saved_of(own) == {}


def test_a_workers_buffers_are_compared_by_dtype_shape_and_bytes() -> None:
    first = {"a": digest(torch.zeros(2, 2)), "b": digest(torch.zeros(4)), "c": digest(torch.zeros(()))}
    mine = {"a": digest(torch.zeros(4)), "b": digest(torch.zeros(4, dtype=torch.int32)), "c": digest(torch.zeros(()))}
    assert differing(mine, first) == ["a", "b"]
    assert digest(torch.ones(2, 3).T) == digest(torch.ones(3, 2))


def write(folder: Path, facts: dict[str, Any], *of_workers: dict[str, Any]) -> None:
    (folder / "workers").mkdir()
    (folder / "run.json").write_text(json.dumps(facts))
    for rank, own in enumerate(of_workers):
        torch.save(own, folder / "workers" / f"rank-{rank}.pt")


def entry(value: float) -> dict[str, Any]:
    return {"value": torch.tensor(value), "persistent": True, "shape": None}


@pytest.mark.parametrize(("rank", "workers", "taken"), [(0, 2, [1, None]), (1, 2, [2, 3]), (1, 3, [1, None])])
def test_each_worker_takes_its_own_where_there_are_as_many(
    tmp_path: Path, rank: int, workers: int, taken: list[float | None]
) -> None:
    first, second = {"mean": entry(1.0)}, {"mean": entry(2.0), "queue": entry(3.0)}
    write(tmp_path, {"workers": 2, "buffers": ["mean", "queue"]}, {"buffers": first}, {"buffers": second})
    start = resume._read(tmp_path, resume._Choice(tmp_path), Workers(rank, workers, torch.device("cpu"), 1))
    found = [start.buffers.get(name, {}).get("value") for name in ("mean", "queue")]
    assert found == taken
    note = (
        f"{tmp_path} was written by 2 workers, which differed in the buffers mean, queue: in this run of 3 workers all "
        "begin with the first one's"
    )
    assert start.notes == ([note] if workers == 3 else [])


def test_a_checkpoint_of_an_older_version_has_none(tmp_path: Path) -> None:
    write(tmp_path, {"workers": 2}, {"rng": 1}, {"rng": 2})
    start = resume._read(tmp_path, resume._Choice(tmp_path), Workers(1, 2, torch.device("cpu"), 1))
    assert (start.own, start.buffers, start.notes) == ({"rng": 2}, {}, [])
