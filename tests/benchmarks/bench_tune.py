"""What the schedule of `ortlaunch tune` finds, beside random search and beside a whole grid.

``python -m tests.benchmarks.bench_tune made`` drives it over made machines of 10,000 cells with noise, failures and
hangs, then over made machines of 48 cells. Nothing is trained; a trial's seconds are only counted.
``ORTLAUNCH_TUNE_SEEDS`` (10) and ``ORTLAUNCH_TUNE_MINUTES`` (10,30,60) choose how many machines and which budgets.

``python -m tests.benchmarks.bench_tune measure [NAME ...]`` measures every cell of the grids of `tune_grids` by trials
of its own, twice in rounds (``ORTLAUNCH_TUNE_ROUNDS``), and keeps them as JSON. It goes on where it was ended;
``ORTLAUNCH_TUNE_MINUTES`` ends it. ``replay [NAME ...]`` searches these grids with ten seeds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from ortlaunch.tune.cell import Value
from ortlaunch.tune.schedule import Schedule
from tests.benchmarks.tune_grids import GRIDS, ROUNDS, Grid
from tests.tune.objective import START, Machine

_SECONDS = 6.0
_SHARE = 0.35
_BEFORE_THE_END = 0.8
"""Share of that for the search; the last measurements come beyond its budget."""
_NEAR = 0.97
SMALL: dict[str, list[Value]] = {
    "backend": ["eager", "compile", "ort"],
    "workers": [1, 2],
    "micro_batch": [1, 4, 16, 64],
    "checkpointing": ["off", "on"],
}


def made() -> None:
    """Prints the speed found, as a share of the truly best cell's, by the schedule and by random search."""
    seeds = range(int(os.environ.get("ORTLAUNCH_TUNE_SEEDS", "10")))
    print("minutes  tune: median  least  trials   random: median  least  trials   figure/true")
    for minutes in map(float, os.environ.get("ORTLAUNCH_TUNE_MINUTES", "10,30,60").split(",")):
        rows = [_found(seed, 60 * minutes) for seed in seeds]
        tune, trials, chance, others, figure = zip(*rows, strict=True)
        told = [one for one in figure if one]
        print(
            f"{minutes:7g}  {statistics.median(tune):12.3f}  {min(tune):5.3f}  {statistics.mean(trials):6.0f}   "
            f"{statistics.median(chance):14.3f}  {min(chance):5.3f}  {statistics.mean(others):6.0f}   "
            f"{statistics.median(told):11.3f}",
            flush=True,
        )


def small() -> None:
    """Prints how near the schedule comes to the best of small made machines in a third of the time of their grid."""
    near, shares = 0, []
    seeds = range(int(os.environ.get("ORTLAUNCH_TUNE_SEEDS", "10")))
    for seed in seeds:
        machine = Machine(seed, SMALL, noise=0.02, failing=0.0, hanging=0.0)
        grid = len(machine.cells) * ROUNDS * (START + _SECONDS)
        finding = Schedule(machine.plan(_SHARE * grid)).run()
        assert finding.winner is not None
        shares.append(machine.speed(finding.winner) / machine.speed(machine.best()))
        near += shares[-1] >= 0.97
        assert machine.spent <= 0.4 * grid, machine.spent / grid
    print(f"48 cells, {_SHARE:.0%} of the grid's time: within 3 % in {near} of {len(seeds)}, least {min(shares):.3f}")


def _found(seed: int, budget: float) -> tuple[float, int, float, int, float]:
    machine = Machine(seed)
    best = machine.speed(machine.best())
    finding = Schedule(machine.plan(budget)).run()
    assert finding.winner is not None
    speed = machine.speed(finding.winner)
    other = Machine(seed)
    by_chance = other.speed(other.random_search(budget))
    return speed / best, len(machine.trials), by_chance / best, len(other.trials), finding.score / speed


def measure(names: list[str]) -> None:
    """Measures the grids of real models, and goes on where an earlier call was ended."""
    minutes = float(os.environ.get("ORTLAUNCH_TUNE_MINUTES", "inf"))
    until = time.monotonic() + 60 * minutes
    for name in names or GRIDS:
        if not Grid.of(name).measure(until):
            print(f"{name}: the minutes are over; the same command goes on")


def replay(names: list[str]) -> None:
    """Prints what the search finds on each grid that was measured: the winner beside the best, and what it cost."""
    seeds = range(int(os.environ.get("ORTLAUNCH_TUNE_SEEDS", "10")))
    for name in names or GRIDS:
        grid = Grid.of(name)
        missing = [number for number, _ in grid.missing()]
        if missing:
            print(f"{name}: {len(missing)} trials of its grid are missing (bench_tune measure {name})")
        if any(number < ROUNDS for number in missing):
            continue
        found = [grid.replayed(seed, _SHARE * _BEFORE_THE_END * grid.seconds()) for seed in seeds]
        near, inside = sum(one.share >= _NEAR for one in found), sum(one.is_inside for one in found)
        costs = [one.cost for one in found]
        print(
            f"{name}: {len(grid.space.cells)} cells, {ROUNDS} rounds, {grid.seconds():.0f} s, "
            f"noise {grid.noise():.1%}\n"
            f"  within 3 % of the best: {near} of {len(found)}, inside its interval (to {grid.lowest_of_best():.3f}): "
            f"{inside}; least {min(one.share for one in found):.3f}\n"
            f"  cost {statistics.median(costs):.0%} of the grid's, most {max(costs):.0%}; best cell left out: "
            f"{sum(one.is_best_pruned for one in found)}, faster than the one kept for it: "
            f"{sum(one.is_loss for one in found)}",
            flush=True,
        )


if __name__ == "__main__":
    parts = {"measure": measure, "replay": replay}
    if sys.argv[1:2] and sys.argv[1] in parts:
        parts[sys.argv[1]](sys.argv[2:])
    else:
        made()
        small()
