"""Grids of real models for `bench_tune`: every cell measured by trials of its own, kept as JSON beside this file.

All cells were measured in two rounds, and those near the best in up to six, because the best of many noisy figures
flatters. A kept grid is a machine on which the search can be replayed with any seed: a trial has the cell's mean speed
with the noise of the measurements, takes the seconds that one of them took, and fails where it failed.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.search import NO_GAIN, NO_TIME, Effort, Plan, Search
from ortlaunch.tune.space import CHECKPOINTING, OFF, Cell, Space

ROUNDS = 2
"""The rounds of the whole grid, whose time is what a search is compared with."""
_OF_INTERVAL = 1.96
_FOLDER = Path(__file__).with_name("grids")
_COMMON = (
    *("device=cpu", "tracking=none", "launcher.workers_per_node=1", "train.batch_size=8", "train.steps=2000"),
    *("backend=eager,compile,ort", "trainer=single,deepspeed", "trainer.zero_stage=0"),
)
GRIDS = {"mlp": ("model=mlp",), "gpt2_nano": ("model=gpt2_nano", "data.seq_len=128"), "resnet": ("model=resnet",)}
"""The words of each grid beside the common ones: three backends, two trainers, micro-batches of 8, 4, 2 and 1, and
checkpointing. One worker on all cores."""


@dataclass
class Grid:
    """The cells of one model and what was measured of each."""

    name: str
    space: Space
    measured: dict[str, list[dict[str, Any]]]
    """The outcomes of a cell's trials, by its text."""

    @classmethod
    def of(cls, name: str) -> Grid:
        """The grid that is kept."""
        space = Space([*GRIDS[name], *_COMMON, f"run_root={tempfile.gettempdir()}/ortlaunch-tune-grids"])
        kept = json.loads((_FOLDER / f"{name}.json").read_text())["cells"]
        return cls(name, space, {str(cell): kept[str(cell)] for cell in space.cells})

    @property
    def work(self) -> float:
        """Samples of the whole run."""
        return float(self.space.asked.train.steps * self.space.batch)

    def score(self, cell: Cell) -> float:
        """The score of a cell with its mean speed; 0 if it does not train.

        The start is that of later trials: an export or a compilation of the first one is kept for a user too.
        """
        kept = self.measured[str(cell)]
        good = [one for one in map(_outcome, kept) if one.ok]
        if 2 * len(good) <= len(kept):
            return 0.0
        start = statistics.median(one.start for one in good[1:] or good)
        return replace(good[-1], start=start, rate=statistics.geometric_mean(one.rate for one in good)).score(self.work)

    def seconds(self) -> float:
        """What the measurement of the whole grid took, without the further rounds of the cells near the best."""
        return sum(one["seconds"] for kept in self.measured.values() for one in kept[:ROUNDS])

    def best(self) -> Cell:
        """The cell with the best score."""
        return max(self.space.cells, key=self.score)

    def noise(self) -> float:
        """The standard deviation of the logarithm of a cell's speeds, over all cells; needs two rounds."""
        apart = []
        for kept in self.measured.values():
            logs = [math.log(one["rate"]) for one in kept if one["status"] == "ok"]
            apart += [statistics.variance(logs)] if len(logs) > 1 else []
        return math.sqrt(statistics.fmean(apart)) if apart else 0.0

    def is_faster(self, one: Cell, other: Cell) -> bool:
        """Whether the measurements tell that a cell is faster than another one, by the noise of all cells."""
        if not self.score(other):
            return self.score(one) > 0
        counts = sum(1 / len(self.measured[str(cell)]) for cell in (one, other))
        apart = math.log(self.score(one) / self.score(other)) if self.score(one) else -math.inf
        return apart > _OF_INTERVAL * self.noise() * math.sqrt(counts)

    def lowest_of_best(self) -> float:
        """The lower end of the 95 % interval of the best cell's score, as a share of it, by the noise of all cells."""
        return math.exp(-_OF_INTERVAL * self.noise() / math.sqrt(len(self.measured[str(self.best())])))

    def replayed(self, seed: int, budget: float) -> Replay:
        """Searches the kept grid.

        Args:
            seed: of the search, and of which measured trial a replayed one is.
            budget: seconds that all trials may take together.
        """
        chance = random.Random(seed)
        spread = self.noise()
        tried: set[Cell] = set()

        def trial(cell: Cell, effort: Effort) -> Outcome:
            # The first trial of a cell pays for what later ones find made, here as when it was measured.
            first, *later = self.measured[str(cell)]
            one = chance.choice(later) if later and cell in tried else first
            tried.add(cell)
            found = _outcome(one)
            if not found.ok:
                return found
            # The noise is in the measured rates already: their mean stands for the cell.
            rates = [kept["rate"] for kept in self.measured[str(cell)] if kept["status"] == "ok"]
            rate = statistics.geometric_mean(rates) * math.exp(chance.gauss(0, spread))
            seconds = one["seconds"] - one["trained_seconds"] + effort.seconds
            return Outcome("ok", seconds, rate=rate, start=found.start, peak_bytes=found.peak_bytes)

        plan = Plan(self.space.cells, trial, budget, self.work, lambda cell: self.space.accumulation(cell) > 1, seed)
        finding = Search(plan).run()
        assert finding.winner is not None
        best = self.best()
        share = self.score(finding.winner) / self.score(best)
        # A cell that was not reached was not pruned.
        is_pruned = finding.pruned.get(best, NO_TIME) not in (NO_TIME, NO_GAIN)
        # The rule about checkpointing keeps the same cell without it. What it loses is the difference of both.
        kept = best.having(CHECKPOINTING, OFF)
        return Replay(
            share,
            finding.spent / self.seconds(),
            is_pruned,
            is_pruned and (kept == best or self.is_faster(best, kept)),
            share >= self.lowest_of_best(),
        )


@dataclass(frozen=True)
class Replay:
    """What one search of a kept grid found."""

    share: float
    """The winner's score in the grid, as a share of the best cell's."""
    cost: float
    """The seconds of its trials, as a share of those of the whole grid."""
    is_best_pruned: bool
    """Whether a rule left the cell with the best score out."""
    is_loss: bool
    """Whether the measurements tell that this cell is faster than the one that the rule has kept in its place."""
    is_inside: bool
    """Whether the winner's score is not below the interval of the best cell's."""


def _outcome(kept: dict[str, Any]) -> Outcome:
    return Outcome(**{key: value for key, value in kept.items() if key != "trained_seconds"})
