"""Every reason not to try a cell: of the space, of other trials, and of the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Device
from ortlaunch.launch.trial import Outcome
from ortlaunch.tune import memory
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.memory import Estimates
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.pruning import Dominance
from ortlaunch.tune.space import Space
from ortlaunch.tune.words import taken_apart
from tests.support.ort import pretend_ort

GIB = 2**30
WORDS = ("model=mlp", "device=cpu", "launcher.workers_per_node=2,1", "train.batch_size=8")


@pytest.fixture(autouse=True)
def ort_as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pruned, and why, is the same in each Python."""
    pretend_ort(monkeypatch)


def space(*words: str, free: tuple[str, ...] = (), hold: tuple[str, ...] = ()) -> Space:
    taken = taken_apart([*dict.fromkeys([*WORDS, *words])], free)
    return Space(prepared(to_config(compose(taken.composed))), taken, free, hold)


def cell(micro: int, checkpointing: str = "off", backend: str = "eager") -> Cell:
    return Cell.of(backend=backend, trainer="ddp", workers=2, micro_batch=micro, checkpointing=checkpointing)


def ok(peak: int = 0) -> Outcome:
    return Outcome("ok", 10.0, rate=100.0, peak_bytes=peak)


NO_MEMORY = Outcome("out of memory", 5.0, reason="no memory")


@pytest.mark.parametrize(
    ("words", "refused", "reason"),
    [
        (["trainer=ddp"], {"trainer": "ddp", "workers": 1}, "exchanges nothing"),
        (["trainer=fsdp"], {"trainer": "fsdp-keep", "workers": 1}, "exchanges nothing"),
        (["trainer=deepspeed"], {"trainer": "zero2", "workers": 1}, "shards nothing"),
        (["trainer=ddp,single"], {"trainer": "single", "workers": 2}, "has one worker"),
        (["backend=eager,ort", "trainer=fsdp"], {"workers": 2, "backend": "ort"}, "does not go with trainer=fsdp"),
        (["trainer=ddp,fsdp", "optimizer=adafactor"], {"trainer": "fsdp", "workers": 2}, "hands the optimizer shards"),
    ],
)
def test_the_space_leaves_out_what_a_rule_refuses_or_what_is_pointless(
    words: list[str], refused: dict[str, Any], reason: str
) -> None:
    found = space("backend=eager", "train.activation_checkpointing=false", *words)
    meant = [why for one, why in found.refused.items() if refused.items() <= dict(one.values).items()]
    assert meant
    assert all(reason in why for why in meant)
    assert not [one for one in found.cells if refused.items() <= dict(one.values).items()]


def test_checkpointing_waits_for_the_same_without_it_and_is_needless_where_that_fits() -> None:
    dominance = Dominance()
    on = cell(4, "on")
    assert dominance.before(on) == [cell(4)]
    assert dominance.before(cell(4)) == []
    assert dominance.reason(on, {}) is None
    assert "the same without checkpointing fits" in str(dominance.reason(on, {cell(4): ok()}))
    assert dominance.reason(on, {cell(4): NO_MEMORY}) is None


def test_offload_comes_after_the_same_without_it_and_is_needless_where_that_fits() -> None:
    dominance = Dominance()
    plain = cell(4).having(trainer="zero2")
    offloaded = cell(4).having(trainer="zero2-offload")
    both = cell(4, "on").having(trainer="zero2-offload")
    assert dominance.before(offloaded) == [plain]
    assert set(dominance.before(both)) == {offloaded, cell(4, "on").having(trainer="zero2")}
    assert "the same on the GPU fits" in str(dominance.reason(offloaded, {plain: ok()}))
    seen = {plain: NO_MEMORY}
    assert dominance.reason(offloaded, seen) is None
    assert "the same without checkpointing fits" in str(dominance.reason(both, seen | {offloaded: ok()}))


def test_what_needs_more_than_a_cell_without_memory_is_not_tried() -> None:
    dominance = Dominance()
    seen = {cell(4): NO_MEMORY}
    assert dominance.reason(cell(8), seen) == f"needs more memory than {cell(4)}, which ran out of it"
    assert dominance.reason(cell(2), seen) is None
    assert dominance.reason(cell(8, "on"), seen) is None
    assert dominance.reason(cell(8, backend="compile"), seen) is None
    both = {cell(4, "on"): NO_MEMORY}
    assert dominance.reason(cell(4), both) is not None
    assert dominance.reason(cell(8, "on"), both) is not None


def test_accumulation_keeps_gradients_so_that_a_larger_micro_batch_may_need_less() -> None:
    dominance = Dominance(accumulates=lambda one: one["micro_batch"] != 8)
    assert dominance.reason(cell(8), {cell(4): NO_MEMORY}) is None
    assert dominance.reason(cell(4), {cell(2): NO_MEMORY}) is not None


def test_the_estimate_is_asked_once_and_holds_for_larger_ones() -> None:
    asked: list[Cell] = []

    def too_large(one: Cell, seen: object) -> str | None:
        asked.append(one)
        return "too large" if int(one["micro_batch"]) >= 4 else None

    dominance = Dominance(too_large)
    assert dominance.estimated(cell(4), {}) == "too large"
    assert dominance.estimated(cell(4), {}) == "too large"
    assert dominance.estimated(cell(8), {}) == f"needs more memory than {cell(4)}: too large"
    assert dominance.estimated(cell(2), {}) is None
    assert asked == [cell(4), cell(2)]


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the estimate was asked for; it says that 12 GiB are needed, and for larger micro-batches more."""
    asked: list[Any] = []

    def estimate(config: Any, limit: int | None, *, quick: bool, quiet: bool, timeout: float) -> dict[str, Any]:
        asked.append(config)
        if config.backend.name == "ort":
            raise RequestError("not known")
        return {"machine": {"low_bytes": int(1.5 * config.train.batch_size * GIB)}}

    monkeypatch.setattr(memory, "estimate", estimate)
    return asked


def test_the_low_figure_of_the_estimate_refuses_and_is_noted(tmp_path: Path, estimated: list[Any]) -> None:
    found = space("backend=eager,ort,compile", "trainer=ddp", "train.activation_checkpointing=false")
    estimates = Estimates(found, 10 * GIB, Notes(tmp_path / "notes"))
    by_micro = {int(one["micro_batch"]): one for one in found.cells if dict(one.values)["backend"] == "eager"}
    # Nothing was tried yet: the first trial shows more than an estimate.
    assert estimates.too_large(by_micro[8], {}) is None
    seen = {by_micro[1]: ok(2 * GIB)}
    reason = estimates.too_large(by_micro[8], seen)
    assert reason == "needs at least 12.00 GiB of the 10.00 GiB it may have (estimate)"
    assert estimates.too_large(by_micro[4], seen) is None
    assert len(estimated) == 2
    assert estimates.too_large(by_micro[8].having(backend="ort"), seen) is None
    assert estimates.too_large(by_micro[8].having(backend="compile"), seen) == reason
    # Far below the limit nothing is estimated, and what was noted is not estimated again.
    assert len(estimated) == 4
    assert estimates.too_large(by_micro[2], {by_micro[1]: ok(GIB)}) is None
    assert Estimates(found, 10 * GIB, Notes(tmp_path / "notes")).too_large(by_micro[8], seen) == reason
    assert len(estimated) == 4
    # What another version has noted otherwise is.
    other = Notes(tmp_path / "notes")
    other.put(f"estimate {by_micro[8]}", {"low": 9})
    assert Estimates(found, 10 * GIB, other).too_large(by_micro[8], seen) == reason
    assert len(estimated) == 5


def test_without_a_limit_nothing_is_estimated(tmp_path: Path, estimated: list[Any]) -> None:
    found = space("backend=eager", "trainer=ddp", "train.activation_checkpointing=false")
    assert Estimates(found, None, Notes(tmp_path / "notes")).too_large(found.cell, {found.cell: ok()}) is None
    assert estimated == []


def test_on_gpus_the_limit_is_that_of_a_gpu(
    tmp_path: Path, estimated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "resolve_device", lambda _device: Device.cuda)
    monkeypatch.setattr(memory, "gpu_memory", lambda: 4 * GIB)
    found = space("backend=eager", "trainer=ddp", "train.activation_checkpointing=false")
    by_micro = {int(one["micro_batch"]): one for one in found.cells}
    estimates = Estimates(found, 1000 * GIB, Notes(tmp_path / "notes"))
    # What a trial took of the host's memory says nothing.
    seen = {by_micro[1]: ok(GIB // 4)}
    assert estimates.too_large(by_micro[2], seen) is None
    assert estimates.too_large(by_micro[4], seen) == "needs at least 6.00 GiB of the 4.00 GiB it may have (estimate)"
    assert len(estimated) == 2
