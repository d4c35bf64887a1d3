"""The search for the largest micro-batch, over drawn machines whose memory is known."""

from __future__ import annotations

import random

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.estimate.micro_batch import largest

MIB = 2**20


class Machine:
    """A machine of some workers, whose phases grow by lines."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.workers = draw.choice([1, 1, 2, 4])
        self.first_size = draw.choice([1, 2, 4, 8, 16, 64])
        self.stays = draw.uniform(100, 2000) * MIB
        step = draw.uniform(0.2, 200) * MIB
        phases = {"step": (1.0, step), "evaluation": (draw.uniform(0.9, 1.2), draw.uniform(0.1, 0.8) * step)}
        phases["checkpoint"] = (draw.uniform(0.5, 1.6), 0.0)
        self._phases = phases
        self.most = draw.choice([200, 5_000, 2**20])
        fitting = draw.choice([0, 3, 7, 30, 100, 1_000, 30_000])
        self.limit = int(self.workers * (self.stays + (fitting + draw.random()) * step))
        self.tried: list[int] = []

    def high(self, size: int) -> int:
        self.tried.append(size)
        return self.needed(size)

    def needed(self, size: int) -> int:
        high = {name: int(self.stays * stays + grows * size) for name, (stays, grows) in self._phases.items()}
        others = {name: one for name, one in high.items() if name != "checkpoint"}
        return max(high.values()) + (self.workers - 1) * max(others.values())

    @property
    def best(self) -> int:
        """The largest that fits."""
        least, most = 0, self.most + 1
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.needed(middle) <= self.limit else (least, middle)
        return least


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_search_is_near_the_best_in_few_traces(first: int) -> None:
    traces = []
    for seed in range(first, first + 100):
        machine = Machine(seed)
        stays = int(machine.workers * machine.stays)
        found = largest(machine.high, machine.limit, machine.first_size, machine.most, stays)
        # A micro-batch that is named was tried.
        assert found == 0 or (found in machine.tried and machine.needed(found) <= machine.limit), seed
        assert found >= 0.95 * machine.best - 1, (seed, found, machine.best, machine.tried)
        assert len(machine.tried) <= 7, seed
        traces.append(len(machine.tried))
    assert sum(traces) / len(traces) <= 3.2


@pytest.mark.parametrize(("limit", "most", "best"), [(250, 1000, 2), (150, 1000, 0), (850, 9, 8)])
def test_a_micro_batch_whose_step_fails_is_left_out(limit: int, most: int, best: int) -> None:
    def high(size: int) -> int:
        if not 2 <= size <= 8:
            raise RequestError("batch normalization refuses one sample")
        return 100 * size

    assert largest(high, limit, 8, most, 0) == best
