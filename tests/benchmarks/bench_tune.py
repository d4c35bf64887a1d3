"""What `ortlaunch tune` finds: on the measured grids of `tune_grids`, and on made machines of 210 cells.

``python -m tests.benchmarks.bench_tune`` replays the search with the noise of real trials. Nothing is trained; a
trial's seconds are only counted. ``ORTLAUNCH_TUNE_SEEDS`` (100) chooses how many seeds.
"""

from __future__ import annotations

import os
import statistics

from ortlaunch.tune.search import Search
from tests.benchmarks.tune_grids import GRIDS, ROUNDS, Grid
from tests.tune.objective import Machine

_SHARE = 0.28
"""The budget, as a share of the time that the rounds of the whole grid took. The last measurements come beyond it."""
_MINUTES = (10, 20)
_NEAR = 0.97


def main() -> None:
    """Prints the speed found, as a share of the best cell's."""
    seeds = range(int(os.environ.get("ORTLAUNCH_TUNE_SEEDS", "100")))
    shares: list[float] = []
    for name in GRIDS:
        grid = Grid.of(name)
        found = [grid.replayed(seed, _SHARE * grid.seconds()) for seed in seeds]
        costs = [one.cost for one in found]
        shares += [one.share for one in found]
        print(
            f"{name}: {len(grid.space.cells)} cells, {ROUNDS} rounds, {grid.seconds():.0f} s, "
            f"noise {grid.noise():.1%}\n"
            f"  {_summary([one.share for one in found])}, inside the best one's interval "
            f"(to {grid.lowest_of_best():.3f}): {sum(one.is_inside for one in found)}\n"
            f"  cost {statistics.median(costs):.0%} of the grid's, most {max(costs):.0%}; best cell left out: "
            f"{sum(one.is_best_pruned for one in found)}, faster than the one kept for it: "
            f"{sum(one.is_loss for one in found)}",
            flush=True,
        )
    print(f"measured grids together: {_summary(shares)}")
    for minutes in _MINUTES:
        print(f"made machines, {minutes} min: {_summary([_found(seed, 60 * minutes) for seed in seeds])}", flush=True)


def _found(seed: int, budget: float) -> float:
    machine = Machine(seed)
    winner = Search(machine.plan(budget)).run().winner
    assert winner is not None
    return machine.speed(winner) / machine.speed(machine.best())


def _summary(shares: list[float]) -> str:
    near = sum(share >= _NEAR for share in shares)
    return f"mean {statistics.fmean(shares):.3f}, least {min(shares):.3f}, within 3 %: {near} of {len(shares)}"


if __name__ == "__main__":
    main()
