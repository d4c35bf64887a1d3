"""How loaders share out, shuffle and repeat their data."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import DataConfig, DigitsConfig, PysourceConfig, SyntheticConfig, TokensConfig
from ortlaunch.data.loader import Loader
from ortlaunch.data.processes import NICENESS
from ortlaunch.data.source import Computed, Share, Source, mix

Load = Callable[..., Loader]


@pytest.fixture
def numbered(tmp_path: Path) -> TokensConfig:
    """53 samples of 4 tokens, the first of which is the sample's number."""
    np.arange(53 * 4, dtype=np.uint16).tofile(tmp_path / "numbered.bin")
    return TokensConfig(path=str(tmp_path / "numbered.bin"), seq_len=4)


def numbers(loader: Loader, batches: int) -> list[list[int]]:
    """Sample numbers of the next batches."""
    return [(batch["input_ids"][:, 0] // 4).tolist() for batch in islice(loader, batches)]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (3, 2), (6, 1)])
def test_ranks_together_see_what_one_rank_with_the_global_batch_sees(
    load: Load, numbered: TokensConfig, world_size: int, batch_size: int
) -> None:
    steps = 20  # 53 samples make 8 whole steps of 6, so this crosses two ends of epochs, each with a rest
    alone = load(numbered, batch_size=6, seed=7)
    ranks = [load(numbered, batch_size=batch_size, rank=r, world_size=world_size, seed=7) for r in range(world_size)]
    assert {loader.batches_per_epoch for loader in (alone, *ranks)} == {8}
    for step in range(steps):
        union = [number for rank in ranks for number in numbers(rank, 1)[0]]
        assert sorted(union) == sorted(numbers(alone, 1)[0]), f"step {step}"
        assert {rank.epoch for rank in ranks} == {alone.epoch} == {step // 8}


def test_an_epoch_shows_no_sample_twice_and_drops_only_the_rest(load: Load, numbered: TokensConfig) -> None:
    seen = [n for batch in numbers(load(numbered, batch_size=5), 10) for n in batch]
    assert len(seen) == len(set(seen)) == 50


def test_order_is_fixed_by_the_seed_and_differs_between_epochs_and_seeds(load: Load, numbered: TokensConfig) -> None:
    first = numbers(load(numbered, seed=1), 52)
    assert first == numbers(load(numbered, seed=1), 52)
    assert first[:26] != first[26:]
    other = numbers(load(numbered, seed=2), 52)
    assert other[:26] != first[:26]
    assert other[:26] != first[26:], "the second epoch of seed 1 must not be the first of seed 2"


def test_the_order_is_that_of_torchs_sampler(load: Load, numbered: TokensConfig) -> None:
    """By which runs go on that were begun when the loader used it."""
    loader = load(numbered, batch_size=2, seed=3)
    samples = Computed(53, lambda _index: {})
    order = DistributedSampler(samples, 1, 0, shuffle=True, seed=mix(3))
    for epoch in range(2):
        order.set_epoch(epoch)
        assert [number for batch in numbers(loader, 26) for number in batch] == list(order)[:52]


def test_loader_processes_give_the_same_batches_and_end(load: Load, numbered: TokensConfig) -> None:
    expected = numbers(load(numbered, batch_size=4), 30)
    before = set(multiprocessing.active_children())
    numbered.workers = 2
    loader = load(numbered, batch_size=4)
    loader.start_processes()
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    assert {process.pid for process in started} == set(loader.processes)
    assert numbers(loader, 30) == expected
    assert loader.epoch == 29 // 13
    assert set(multiprocessing.active_children()) - before == started
    assert all(psutil.Process(process.pid).nice() == min(19, os.nice(0) + NICENESS) for process in started)
    loader.close()
    assert not any(process.is_alive() for process in started)
    assert list(loader) == []


def test_loader_closes_as_a_context_manager(load: Load, numbered: TokensConfig) -> None:
    before = set(multiprocessing.active_children())
    numbered.workers = 1
    with load(numbered) as loader:
        next(loader)
    assert set(multiprocessing.active_children()) == before


def test_a_users_error_in_a_loader_process_is_one_message(load: Load, numbered: TokensConfig) -> None:
    before = set(multiprocessing.active_children())
    numbered.workers, numbered.vocab_size = 1, 5
    loader = load(numbered)
    with pytest.raises(RequestError) as error:
        next(loader)
    assert "numbered.bin: token " in str(error.value)
    assert "Traceback" not in str(error.value)
    assert "\n" not in str(error.value)
    loader.close()
    assert set(multiprocessing.active_children()) == before, "the error at hand must not keep the process alive"


class Noise(Dataset[dict[str, torch.Tensor]]):
    """Samples that are drawn when they are read, as an augmentation is."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.rand(1), "labels": torch.tensor(index)}


@dataclass
class NoiseConfig(DataConfig):
    name: str = "noise"

    def open(self, share: Share) -> Source:
        return Source(Noise(), "images", "data=noise", "noise")


def test_loader_processes_of_each_rank_draw_numbers_of_their_own(load: Load) -> None:
    drawn = [
        next(load(NoiseConfig(workers=1), rank=rank, world_size=2, seed=seed))["pixel_values"].flatten().tolist()
        for rank, seed in ((0, 3), (1, 3), (0, 3))
    ]
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])


def test_labels_are_a_copy_of_the_ids(load: Load) -> None:
    batch = next(load(SyntheticConfig(seq_len=8)))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].dtype == batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    batch["labels"].fill_(-100)
    assert (batch["input_ids"] >= 0).all()


def test_loading_leaves_the_global_random_state_alone(load: Load) -> None:
    before = torch.get_rng_state()
    next(load(SyntheticConfig()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("cfg", "options", "parts"),
    [
        (SyntheticConfig(samples=7), {"batch_size": 4, "world_size": 2}, ("train.batch_size=4", "data.samples=7")),
        (DigitsConfig(), {"batch_size": 1798}, ("train.batch_size=1798", "data=digits", "1797")),
        (SyntheticConfig(), {"batch_size": 0}, ("train.batch_size=0",)),
        (SyntheticConfig(seq_len=1), {}, ("data.seq_len=1", "at least 2")),
        (SyntheticConfig(workers=-1), {}, ("data.workers=-1",)),
        (PysourceConfig(seq_len=10_000_000), {}, ("data=pysource", "data.seq_len=10000000")),
    ],
)
def test_requests_that_cannot_work_say_so(
    load: Load, cfg: DataConfig, options: dict[str, int], parts: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as error:
        load(cfg, **options)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_batch_that_just_fits_is_accepted(load: Load) -> None:
    loader = load(SyntheticConfig(samples=8), batch_size=4, world_size=2)
    assert loader.batches_per_epoch == 1
    next(loader), next(loader)
    assert loader.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 7, 13, 14, 26, 40])
def test_a_loader_goes_on_where_another_was_left(load: Load, numbered: TokensConfig, taken: int, workers: int) -> None:
    """13 batches of 4 make an epoch of 53 samples."""
    numbered.workers = workers
    expected = numbers(load(numbered, batch_size=2, rank=1, world_size=2), 60)
    left = load(numbered, batch_size=2, rank=1, world_size=2)
    numbers(left, taken)
    resumed = load(numbered, batch_size=2, rank=1, world_size=2, start=left.position)
    assert resumed.epoch == left.epoch or taken % 13 == 0
    assert numbers(resumed, 20) == expected[taken : taken + 20]
    assert (resumed.epoch, resumed.position.epoch) == ((taken + 19) // 13,) * 2


@pytest.mark.parametrize(("before", "after"), [((2, 3), (3, 2)), ((2, 3), (1, 4)), ((1, 5), (4, 2)), ((4, 2), (3, 3))])
def test_another_number_of_ranks_goes_on_without_a_gap(
    load: Load, numbered: TokensConfig, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """(ranks, batch size) before and after: no sample of an epoch comes twice, and what is left out is less than a
    step."""
    ranks = [load(numbered, batch_size=before[1], rank=r, world_size=before[0]) for r in range(before[0])]
    steps = 4
    seen = [n for rank in ranks for batch in numbers(rank, steps) for n in batch]
    (position,) = {rank.position for rank in ranks}
    assert position.samples == len(seen) == steps * before[0] * before[1]
    others = [load(numbered, batch_size=after[1], rank=r, world_size=after[0], start=position) for r in range(after[0])]
    together = after[0] * after[1]
    left = (53 - len(seen)) // together
    for _ in range(left):
        seen += [n for rank in others for n in numbers(rank, 1)[0]]
        assert {rank.epoch for rank in others} == {0}
    assert len(seen) == len(set(seen)) > 53 - together
    next_epoch = [n for rank in others for batch in numbers(rank, 53 // together) for n in batch]
    assert {rank.epoch for rank in others} == {1}
    assert len(next_epoch) == len(set(next_epoch))
