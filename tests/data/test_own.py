"""Data sets of the user's own: each sample once in an epoch, whoever reads it and wherever the reading began anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import named
from ortlaunch.data.loader import Loader, build_loader
from ortlaunch.data.position import Position
from ortlaunch.data.sources.factory import FactoryConfig
from tests.data import own_data

Load = Callable[..., Loader]
HERE = "tests.data.own_data"


def own(target: str, *, workers: int = 0, drop_last: bool = False, shard: bool = False, **params: Any) -> FactoryConfig:
    return FactoryConfig(
        target=f"{HERE}:{target}", params=params, workers=workers, drop_last=drop_last, shard=shard, eval_fraction=0.0
    )


def numbers(batch: Any) -> list[int]:
    """The numbers of a batch's samples."""
    (found,) = (tensor for path, tensor in named(batch).items() if path.endswith("number"))
    return [int(number) for number in found]


def stored(position: Position) -> Position:
    """A position out of a checkpoint."""
    file = BytesIO()
    torch.save({**position.as_dict(), "states": position.states}, file)
    file.seek(0)
    return Position(**torch.load(file, weights_only=True))


def epoch(cfg: FactoryConfig, number: int, size: int, world: int, start: Position, most: int = 10**9) -> Any:
    """What the workers read of an epoch: the batches of each, the rows of all of them, and the position after it."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(build_loader(cfg, batch_size=size, rank=rank, world_size=world, seed=3, start=start))
            for rank in range(world)
        ]
        rows: list[list[int]] = []
        while loaders[0].position.epoch == number and len(rows) < most:
            positions, row = [loader.position for loader in loaders], []
            for loader in loaders:
                batch = next(loader)
                row += numbers(batch)[: loader.counted]
                assert loader.counted in (0, len(numbers(batch)))
            if loaders[0].epoch != number:
                return rows, positions[0]
            assert loaders[0].everyone == len(row)
            rows.append(row)
        return rows, loaders[0].position


DRAWN = {
    "n": st.integers(1, 40),
    "size": st.integers(1, 5),
    "worlds": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "sizes_after": st.integers(1, 5),
    "cut": st.integers(0, 12),
    "shard": st.booleans(),
}


def each_sample_comes_once(
    n: int, size: int, worlds: tuple[int, int], sizes_after: int, cut: int, shard: bool, processes: tuple[int, int]
) -> None:
    cfg = own("Stream" if shard else "Padded", shard=shard, n=n, workers=processes[0])
    before, position = epoch(cfg, 0, size, worlds[0], Position(), most=cut)
    seen = [number for row in before for number in row]
    if position.epoch == 0 and position.samples < n:
        later = replace(cfg, workers=processes[1])
        after, _ = epoch(later, 0, sizes_after, worlds[1], stored(position))
        seen += [number for row in after for number in row]
    assert sorted(seen) == list(range(n))
    if shard:
        assert seen == list(range(n)) or worlds[0] > 1 or worlds[1] > 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**DRAWN)
def test_each_sample_comes_once_in_an_epoch_that_other_workers_go_on_with(**drawn: Any) -> None:
    each_sample_comes_once(**drawn, processes=(0, 0))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(**DRAWN, processes=st.tuples(st.integers(1, 3), st.integers(0, 3)))
def test_the_same_with_loader_processes(**drawn: Any) -> None:
    each_sample_comes_once(**drawn)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(n=st.integers(8, 40), size=st.integers(1, 4), worlds=st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_what_is_left_of_an_epoch_is_dropped_on_request(n: int, size: int, worlds: tuple[int, int]) -> None:
    for shard in (False, True):
        cfg = own("Stream" if shard else "Numbers", drop_last=True, shard=shard, n=n)
        rows, _ = epoch(cfg, 0, size, worlds[0], Position())
        assert [len(row) for row in rows] == [size * worlds[0]] * (n // (size * worlds[0]))


@pytest.mark.parametrize("target", ["Parts", "Resumable"])
@pytest.mark.parametrize("processes", [0, 3])
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_stream_in_parts_goes_on_where_each_loader_process_was(
    load: Load, target: str, processes: int, cut: int
) -> None:
    cfg = own(target, n=23, workers=processes)
    whole = load(cfg, batch_size=2)
    expected = [numbers(next(whole)) for _ in range(20)]
    assert processes or sorted(number for batch in expected[:12] for number in batch) == list(range(23))
    first = load(cfg, batch_size=2)
    for batch in expected[:cut]:
        assert numbers(next(first)) == batch
    own_data.Resumable.reads = 0
    second = load(cfg, batch_size=2, start=stored(first.position))
    assert [numbers(next(second)) for _ in expected[cut:]] == expected[cut:]
    if target == "Resumable" and not processes:
        # It begins at its state; what was read before is not read again.
        assert own_data.Resumable.reads <= sum(map(len, expected[cut:]))


def test_what_samples_draw_is_the_same_after_a_resume_and_with_loader_processes(load: Load) -> None:
    def drawn(loader: Loader, batches: int) -> list[list[float]]:
        return [next(loader).parts["drawn"].flatten().tolist() for _ in range(batches)]

    whole = drawn(load(own("Numbers", n=10), batch_size=4), 7)
    assert len({value for batch in whole for value in batch}) == 24, "each batch draws others, in each epoch"
    torch.rand(1)
    first = load(own("Numbers", n=10), batch_size=4)
    assert drawn(first, 3) == whole[:3]
    after = torch.rand(1)
    assert drawn(load(own("Numbers", n=10, workers=2), batch_size=4, start=first.position), 4) == whole[3:]
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    drawn(first, 1)
    assert torch.equal(torch.rand(1), expected) and not torch.equal(after, expected)


def test_a_mapping_brings_what_is_evaluated_and_how_samples_are_collated(load: Load) -> None:
    loader = load(own("both", n=10), batch_size=4)
    assert sorted(next(loader).tolist() + next(loader).tolist() + next(loader).tolist()) == list(range(10))
    held_out = loader.held_out(5)
    assert [(one.batch.tolist(), one.samples) for one in held_out] == [([0, 1, 2, 3], 4), ([4], 1)]


def test_nested_samples_become_a_nested_batch(load: Load) -> None:
    batch = next(load(own("Numbers", n=4), batch_size=4))
    assert type(batch) is own_data.Sample and type(batch.parts["pair"]) is own_data.Pair
    order = batch.number.tolist()
    assert batch.parts["pair"].left.tolist() == [[float(number)] * 2 for number in order]
    assert batch.parts["pair"].right[0].tolist() == order
    assert batch.parts["pair"].right[1] == [f"text {number}" for number in order]


@pytest.mark.parametrize(
    ("target", "keys", "parts"),
    [
        ("no_train", {}, ("a mapping with training (", "own_data.py:", "'train'")),
        ("generated", {}, ("a generator, which can be read once",)),
        ("loader", {}, ("a DataLoader: return its data set",)),
        ("nothing", {}, ("a NoneType", "return a torch.utils.data.Dataset")),
        ("Endless", {"params": {}}, ("Endless without __len__ (", "own_data.py:")),
        ("fails", {}, ("KeyError: 'a column'", "own_data.py:")),
        ("no_tensors", {}, ("gives a str without tensors",)),
        ("bad_collate", {}, ("collating the samples", "TypeError", "own_data.py:")),
        ("Numbers", {"params": {"n": 0}}, ("empty data set",)),
        ("Numbers", {"params": {"size": 3}}, ("data.params.size", "n, ragged")),
        ("Numbers", {"params": {}}, ("without data.params.n",)),
        ("Numbers", {"shard": True}, ("data.shard=true", "shared out anyway")),
        (
            "Numbers",
            {"params": {"n": 9, "ragged": True}},
            (", sample ", "parts.pair.left is a Tensor of shape (", "pads"),
        ),
        ("Fails", {"params": {"n": 9}}, ("reading sample 3 of data.target=", "ZeroDivisionError", "own_data.py:")),
        ("Unsaveable", {}, ("state_dict", "numbers, texts")),
        ("Missing", {}, ("has no 'Missing'",)),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_trained_on_is_one_message(
    load: Load, target: str, keys: dict[str, Any], parts: tuple[str, ...], workers: int
) -> None:
    cfg = replace(own(target, n=9), workers=workers, **keys)
    with pytest.raises(RequestError) as refused:
        list(zip(range(3), load(cfg, batch_size=4), strict=False))
    assert all(part in str(refused.value) for part in parts), refused.value
    assert "Traceback" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_stream_holds_nothing_out_by_itself(load: Load) -> None:
    with pytest.raises(RequestError, match="a mapping with 'train' and 'eval'"):
        load(own("Stream", n=9, shard=True)).held_out(3)


@pytest.mark.parametrize(("target", "alike"), [("Stream", True), ("Parts", False)])
def test_loader_processes_that_read_the_same_are_seen(load: Load, target: str, alike: bool) -> None:
    loader = load(own(target, n=23, workers=2), batch_size=2)
    digests = loader.first_digests()
    assert len(digests) == 2 and (len(set(digests)) == 1) is alike
    # They are still there to train on.
    assert numbers(next(loader)) == [0, 1] if alike else [0, 2]
