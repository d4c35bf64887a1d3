"""Where a script's loader goes on: in the order that its epoch was begun with."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ortlaunch.base.errors import RequestError
from ortlaunch.data.position import Position
from ortlaunch.trainer.script_loader import ScriptLoader


def shuffled(samples: int = 10, *, own_generator: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3) if own_generator else None
    return DataLoader(TensorDataset(torch.arange(samples)), 2, shuffle=True, generator=generator)


def taken(loader: ScriptLoader, count: int) -> tuple[list[list[int]], Position]:
    found = [next(loader) for _ in range(count)]
    return [one.batch[0].tolist() for one in found], found[-1].position


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_shuffled_loader_goes_on_within_its_second_epoch(own_generator: bool) -> None:
    first = ScriptLoader(shuffled(own_generator=own_generator), Position())
    _, position = taken(first, 8)
    expected, _ = taken(first, 2)
    torch.manual_seed(99)
    found, _ = taken(ScriptLoader(shuffled(own_generator=own_generator), position), 2)
    assert found == expected


def test_steps_without_a_loader_are_counted_on() -> None:
    loader = ScriptLoader(None, Position(batches=3))
    assert next(loader).position.batches == 4


def test_what_cannot_be_gone_on_with_is_refused() -> None:
    _, position = taken(ScriptLoader(shuffled(own_generator=False), Position()), 4)
    with pytest.raises(RequestError, match="the loader has only 1"):
        ScriptLoader(shuffled(2, own_generator=False), position)
    once = ScriptLoader(iter([torch.ones(1)]), Position())
    next(once)
    with pytest.raises(RequestError, match="gives no batch"):
        next(once)
