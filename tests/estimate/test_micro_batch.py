"""The search for the largest micro-batch, over drawn machines whose memory is known."""

from __future__ import annotations

import random

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.estimate.micro_batch import Search, Sized

MIB = 2**20


class Machine:
    """A machine of some workers, whose phases grow by lines, with holes of the allocator that no line has."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.workers = draw.choice([1, 1, 2, 4])
        self.first_size = draw.choice([1, 2, 4, 8, 16, 64])
        self.stays = draw.uniform(100, 2000) * MIB
        step = draw.uniform(0.2, 200) * MIB
        phases = {"step": (1.0, step), "evaluation": (draw.uniform(0.9, 1.2), draw.uniform(0.1, 0.8) * step)}
        phases["checkpoint"] = (draw.uniform(0.5, 1.6), 0.0)
        self._phases = phases
        self._holes = draw.choice([0.0, 0.01, 0.05])
        self._seed = seed
        self.most = draw.choice([200, 5_000, 2**20])
        fitting = draw.choice([0, 3, 7, 30, 100, 1_000, 30_000])
        self.limit = int(self.workers * (self.stays + (fitting + draw.random()) * step))
        self.tried: list[int] = []

    def sized(self, size: int) -> Sized:
        self.tried.append(size)
        return self._with_hole(size, random.Random(self._seed * 1_000_003 + size).uniform(0, self._holes))

    def _with_hole(self, size: int, hole: float) -> Sized:
        high = {
            name: int((1 + hole) * (self.stays * stays + grows * size)) for name, (stays, grows) in self._phases.items()
        }
        others = {name: one for name, one in high.items() if name != "checkpoint"}
        return Sized(max(high.values()) + (self.workers - 1) * max(others.values()), high, others)

    @property
    def best(self) -> int:
        """The largest that fits with any hole."""
        least, most = 0, self.most + 1
        while most - least > 1:
            middle = (least + most) // 2
            fits = self._with_hole(middle, self._holes).high <= self.limit
            least, most = (middle, most) if fits else (least, middle)
        return least


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_search_is_near_the_best_in_few_traces(first: int) -> None:
    traces = []
    for seed in range(first, first + 100):
        machine = Machine(seed)
        search = Search(machine.sized, machine.limit, machine.workers, machine.most, int(machine.stays))
        found = search.largest(machine.first_size)
        # A micro-batch that is named was tried.
        assert found == 0 or found in machine.tried, seed
        assert machine.sized(found).high <= machine.limit or found == 0, seed
        assert found >= 0.95 * machine.best - 1, (seed, found, machine.best, machine.tried)
        assert len(machine.tried[:-1]) <= 6, seed
        traces.append(len(machine.tried[:-1]))
    assert sum(traces) / len(traces) <= 4.5


@pytest.mark.parametrize(("limit", "most", "best"), [(250, 1000, 2), (150, 1000, 0), (850, 9, 8)])
def test_a_micro_batch_whose_step_fails_is_left_out(limit: int, most: int, best: int) -> None:
    def sized(size: int) -> Sized:
        if not 2 <= size <= 8:
            raise RequestError("batch normalization refuses one sample")
        return Sized(100 * size, {"step": 100 * size}, {"step": 100 * size})

    assert Search(sized, limit, 1, most, 0).largest(8) == best
