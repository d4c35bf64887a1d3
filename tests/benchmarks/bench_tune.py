"""What the schedule of `ortlaunch tune` finds, beside random search and beside a whole grid.

``python -m tests.benchmarks.bench_tune made`` drives it over made machines of 10,000 cells with noise, failures and
hangs, then over made machines of 48 cells. Nothing is trained; a trial's seconds are only counted.
``ORTLAUNCH_TUNE_SEEDS`` (10) and ``ORTLAUNCH_TUNE_MINUTES`` (10,30,60) choose how many machines and which budgets.

``python -m tests.benchmarks.bench_tune real KEY=VALUE ...`` tunes a model here, then runs every cell of the same space
three times in rounds (``ORTLAUNCH_TUNE_ROUNDS``). It prints how near the winner is to the best of the grid, and what
share of the grid's time the tuning took. Give it a space of few cells: each takes a minute.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.tune.cell import Cell, Effort, Value
from ortlaunch.tune.schedule import Schedule
from ortlaunch.tune.space import Space
from ortlaunch.tune.trial import Trials
from ortlaunch.tune.words import taken_apart
from tests.tune.objective import START, Machine

_ROUNDS = int(os.environ.get("ORTLAUNCH_TUNE_ROUNDS", "3"))
_SECONDS = 6.0
_SHARE = 0.35
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
        grid = len(machine.cells) * _ROUNDS * (START + _SECONDS)
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


def real(words: list[str]) -> None:
    """Tunes, measures the grid, and prints the winner beside the grid's best."""
    with tempfile.TemporaryDirectory(prefix="ortlaunch-bench-tune-") as name:
        folder = Path(name)
        keys = [word for word in words if not word.startswith("--")]
        options = [word for word in words if word.startswith("--")]
        keys += [f"run_root={folder}", "tracking=none"]
        tuned = _tuned([*keys, *options])
        grid, seconds = _grid(keys, options, folder)
    best = max(grid, key=lambda cell: statistics.median(grid[cell]))
    winner = next(cell for cell in grid if dict(cell.values) == tuned["winner"])
    share = statistics.median(grid[winner]) / statistics.median(grid[best])
    for cell in sorted(grid, key=lambda cell: -statistics.median(grid[cell])):
        print(f"{statistics.median(grid[cell]):12,.1f} ({min(grid[cell]):,.1f} to {max(grid[cell]):,.1f})  {cell}")
    print(f"winner: {winner}: {share:.3f} of the grid's best, {best}")
    print(f"{tuned['seconds']:.0f} s of trials, {tuned['seconds'] / seconds:.0%} of the {seconds:.0f} s of the grid")


def _tuned(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "ortlaunch", "tune", *words, "--again", "--format=json"]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def _grid(words: list[str], options: list[str], folder: Path) -> tuple[dict[Cell, list[float]], float]:
    """The scores of each cell in each round, and the seconds of all."""
    taken = taken_apart(words, [])
    hold = [name for word in options if word.startswith("--hold=") for name in word.partition("=")[2].split(",")]
    config = prepared(to_config(compose(taken.composed)))
    space = Space(config, taken, (), tuple(name.replace("-", "_") for name in hold))
    (folder / "grid" / "ended").mkdir(parents=True)
    (folder / "grid" / "tasks").mkdir()
    numbers = iter(range(10**6))
    trials = Trials(space, folder / "grid", None, lambda: next(numbers), lambda run: None)
    work = float(config.train.steps * space.batch)
    found: dict[Cell, list[float]] = {}
    rates: dict[Cell, float] = {}
    seconds = 0.0
    for number in range(_ROUNDS):
        for cell in space.cells:
            rate = rates.get(cell) or (statistics.median(rates.values()) if rates else None)
            outcome = trials.run(cell, Effort("round", number, _SECONDS, rate, math.inf))
            seconds += outcome.seconds
            rates |= {cell: outcome.rate} if outcome.ok else {}
            found.setdefault(cell, []).append(outcome.score(work))
    return found, seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["real"]:
        real(sys.argv[2:])
    else:
        made()
        small()
