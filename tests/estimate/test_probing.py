"""ONNX Runtime's memory by probes: the line through them, what is kept, and what becomes of a probe that fails."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Allow, Config, OrtConfig
from ortlaunch.estimate import probe, probing
from ortlaunch.estimate.probe import Peak, ProcessMeter
from ortlaunch.estimate.probing import Line, NoMemoryError, line_of

MIB = 2**20
DAMAGED = (
    *({"4": {}}, {"4": {"step": [-1, 1, 1]}}, {"4": {"step": 1}}, {"4": {"step": [1, 1]}}),
    *({"x": {"step": [1, 1, 1]}}, {"2": {"step": [1, 1, 1]}, "4": {"end": [1, 1, 1]}}, [1]),
)
"""Contents of a file that are no probes."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    return to_config(compose(["model=gpt2_nano", "trainer=single", "backend=ort", "device=cpu"]))


def always(size: int) -> Peak:
    """The peak of a phase in which nothing is by chance."""
    return Peak(size, size, size)


def with_batch(config: Config, size: int) -> Config:
    return replace(config, train=replace(config.train, batch_size=size))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro-batches that were probed; each sample of a step takes 10 MiB, and 100 MiB are always there."""
    made: list[int] = []

    def probed(_config: Config, size: int, _world_size: int, _threads: int) -> dict[str, Peak]:
        made.append(size)
        return {"start": always(200 * MIB), "step": always((100 + 10 * size) * MIB)}

    monkeypatch.setattr(probing, "_probed", probed)
    return made


def test_a_line_goes_through_its_probes_and_is_surest_there() -> None:
    line = Line({8: {"step": always(180 * MIB)}, 16: {"step": always(260 * MIB)}})
    (at, between, beyond) = (line.bands(size, 17 * MIB)["step"] for size in (16, 12, 64))
    assert (at.middle, between.middle, beyond.middle) == (277 * MIB, 237 * MIB, 757 * MIB)
    assert (at.high - at.middle) / at.middle < (beyond.high - beyond.middle) / beyond.middle
    assert all(one.low < one.middle < one.high for one in (at, between, beyond))


def test_two_runs_of_a_small_configuration_differ_by_more_than_a_share() -> None:
    # Measured: a probe of 617 MiB, and workers of several runs.
    band = Line({64: {"step": always(617 * MIB)}, 32: {"step": always(617 * MIB)}}).bands(64, 0)["step"]
    assert band.low < 618 * MIB < 673 * MIB < band.high


def test_what_is_there_by_chance_is_in_the_band() -> None:
    # Of number 43 of seed 0: it has taken 2,600 MiB a worker, and 3,050 with a checkpoint's copy beside a comparison.
    sizes = (2500 * MIB, 2600 * MIB, 3050 * MIB)
    band = Line({size: {"checkpoint": Peak(*sizes)} for size in (1, 2)}).bands(2, 0)["checkpoint"]
    least, most = (Line({one: {"checkpoint": always(size)} for one in (1, 2)}).bands(2, 0) for size in sizes[::2])
    assert band.middle == 2600 * MIB
    assert (band.low, band.high) == (least["checkpoint"].low, most["checkpoint"].high)


def test_a_larger_micro_batch_never_needs_less() -> None:
    line = Line({1: {"step": always(500 * MIB)}, 2: {"step": always(490 * MIB)}})
    assert line.bands(64, 0)["step"].middle == 490 * MIB


def test_probes_are_kept_for_micro_batches_near_them(config: Config, probes: list[int]) -> None:
    line = line_of(with_batch(config, 16), 1, 1, may_probe=True)
    assert line is not None
    assert (line.sizes, probes) == ((8, 16), [16, 8])
    for size in (4, 16, 32):
        assert line_of(with_batch(config, size), 1, 1, may_probe=True) is not None
    assert probes == [16, 8]
    again = line_of(with_batch(config, 128), 1, 1, may_probe=True)
    assert again is not None
    assert (again.sizes, probes) == ((8, 16, 64, 128), [16, 8, 128, 64])


def test_without_leave_to_probe_only_what_is_kept_is_used(config: Config, probes: list[int]) -> None:
    assert line_of(config, 1, 1, may_probe=False) is None
    line_of(with_batch(config, 16), 1, 1, may_probe=True)
    assert line_of(with_batch(config, 1024), 1, 1, may_probe=False) is not None
    # Another key than the micro-batch makes another run.
    longer = replace(config, train=replace(config.train, activation_checkpointing=True))
    assert line_of(longer, 1, 1, may_probe=False) is None
    assert line_of(config, 2, 1, may_probe=False) is None
    assert probes == [16, 8]


def test_one_sample_is_probed_beside_two(config: Config, probes: list[int]) -> None:
    line = line_of(with_batch(config, 1), 1, 1, may_probe=True)
    assert line is not None
    assert line.sizes == (1, 2)


def test_what_does_not_fit_is_halved(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def probed(_config: Config, size: int, _world_size: int, _threads: int) -> dict[str, Peak]:
        if size > 20:
            raise NoMemoryError("too large")
        return {"step": always(size)}

    monkeypatch.setattr(probing, "_probed", probed)
    line = line_of(with_batch(config, 64), 1, 1, may_probe=True)
    assert line is not None
    assert line.sizes == (8, 16)
    with pytest.raises(RequestError, match="too large"):
        line_of(with_batch(config, 10_000), 1, 1, may_probe=True)


def test_a_damaged_file_is_no_probe(config: Config, probes: list[int], tmp_path: Path) -> None:
    line_of(config, 1, 1, may_probe=True)
    (file,) = (tmp_path / "cache" / "probes").iterdir()
    for content in DAMAGED:
        file.write_text(json.dumps(content))
        assert line_of(config, 1, 1, may_probe=False) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.params.n_embd=130"], "micro-batch 4: .*130"),
        (["data.vocab_size=999", "data=synthetic"], "micro-batch 4: "),
    ],
)
@pytest.mark.nightly
@pytest.mark.ort
def test_a_probe_that_is_refused_says_why(config: Config, words: list[str], message: str) -> None:
    wrong = to_config(compose(["model=gpt2_nano", "trainer=single", "backend=ort", "device=cpu", *words]))
    with pytest.raises(RequestError, match=message):
        line_of(wrong, 1, 1, may_probe=True)


@pytest.mark.nightly
@pytest.mark.ort
def test_a_probe_ends_at_its_limits(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "available", lambda: 20 * MIB)
    with pytest.raises(NoMemoryError, match=r"micro-batch 2 does not fit into 0\.0 GiB"):
        line_of(config, 1, 1, may_probe=True)
    monkeypatch.undo()
    monkeypatch.setattr(probing, "_SECONDS", 1)
    with pytest.raises(RequestError, match="micro-batch 4 takes more than 1 s of processor time"):
        line_of(config, 1, 1, may_probe=True)


@pytest.mark.parametrize(("size", "sizes"), [(1, (2, 4)), (3, (3, 6)), (4, (2, 4))])
def test_where_one_sample_cannot_train_a_larger_micro_batch_is_probed(
    config: Config, monkeypatch: pytest.MonkeyPatch, size: int, sizes: tuple[int, int]
) -> None:
    def probed(_config: Config, size: int, _world_size: int, _threads: int) -> dict[str, Peak]:
        if size == 1:
            raise RequestError("micro-batch 1: ValueError: Expected more than 1 value per channel")
        return {"step": always(size * MIB)}

    monkeypatch.setattr(probing, "_probed", probed)
    line = line_of(with_batch(config, size), 1, 1, may_probe=True)
    assert line is not None
    assert line.sizes == sizes


def test_a_probe_tells_the_step_beside_a_copy_from_what_is_there_for_certain() -> None:
    # Tensors of this size are mappings, whatever other tests have left in the heap of this process.
    words = ("model=mlp", "model.params.hidden_dim=150000", "trainer=single", "backend=eager", "device=cpu")
    config = to_config(compose([*words, "train.steps=3", "train.checkpoint_every=2"]))
    try:
        found = probe.phases(config, 1, 2)
    finally:
        dist.destroy_process_group()
    gradients = 150_000 * 64 * 4
    copied = found["checkpoint"]
    assert copied.least <= copied.likely <= copied.most
    assert copied.least + gradients // 2 < copied.most
    # The copy's memory may stay when it was written.
    assert found["end"].least <= copied.least
    assert found["end"].most - found["end"].likely == copied.most - copied.likely
    assert all(len({*found[name]}) == 1 for name in ("build", "start", "step"))


def test_a_copy_is_gone_when_a_worker_would_have_written_it() -> None:
    """This process computes with one thread of two, so that it comes as far in twice the time."""
    gone: list[float] = []
    meter, begun = ProcessMeter(threads=2), time.process_time()
    with meter.after(0.1, lambda: gone.append(time.process_time() - begun)):
        while time.process_time() - begun < 10 and not gone:
            pass
    assert 0.2 <= gone[0] < 10
    with meter.after(1000, lambda: gone.append(0.0)):
        pass
    assert len(gone) == 1


@pytest.mark.parametrize("allowed", [[], ["wrong_gradients"]])
def test_a_probe_compares_gradients_where_the_run_does_and_is_refused_nothing_else(allowed: list[str]) -> None:
    found = probe._unhindered(OrtConfig(allow=[Allow[name] for name in allowed]))
    assert {kind.value for kind in Allow} - {kind.value for kind in found.allow} == {"wrong_gradients"} - set(allowed)
