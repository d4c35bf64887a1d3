"""Grids of real models for `bench_tune`: every cell measured by trials of its own, kept as JSON beside this file.

The best of many noisy figures flatters, so the cells near the best are measured in further rounds.

A kept grid is a machine on which the search can be replayed with any seed: a trial has the cell's mean speed with the
noise of the measurements, takes the seconds that one of them took, and fails where it failed.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ortlaunch.base.files import replace_text
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell, Effort
from ortlaunch.tune.folder import machine
from ortlaunch.tune.plan import Plan
from ortlaunch.tune.pruning import CHECKPOINTING, OFF, Dominance
from ortlaunch.tune.schedule import NO_GAIN, NO_TIME, Schedule
from ortlaunch.tune.space import Space
from ortlaunch.tune.trial import Trials, steps_for
from ortlaunch.tune.words import ALLOCATOR, THREADS, taken_apart

ROUNDS = int(os.environ.get("ORTLAUNCH_TUNE_ROUNDS", "2"))
CLOSE_ROUNDS = int(os.environ.get("ORTLAUNCH_TUNE_CLOSE_ROUNDS", "6"))
"""Rounds in all of the cells near the best."""
_CLOSE = 0.9
"""Share of the best score from which on a cell is near the best."""
SECONDS = 3.0
"""Seconds of training of a measured trial."""
MOST_CELLS = 48
_LEAST_SECONDS = SECONDS / 4
"""A trial that trained for less says nothing of a cell's speed."""
_BUSY = 0.1
"""A trial during which other processes had this share of the cores says nothing of it either."""
_OF_INTERVAL = 1.96
_FOLDER = Path(__file__).with_name("grids")
_TIMEOUT = 600.0
_COMMON = (
    *("device=cpu", "tracking=none", "launcher.workers_per_node=1", "train.batch_size=8", "train.steps=2000"),
    *("backend=eager,compile,ort", "trainer=single,deepspeed", "trainer.zero_stage=0"),
)
GRIDS = {"mlp": ("model=mlp",), "gpt2_nano": ("model=gpt2_nano", "data.seq_len=128"), "resnet": ("model=resnet",)}
"""The words of each grid beside the common ones: three backends, two trainers, micro-batches of 8, 4, 2 and 1, and
checkpointing. One worker on all cores, with glibc's usual settings: the other axes are another experiment."""


@dataclass
class Grid:
    """The cells of one model and what was measured of each."""

    name: str
    space: Space
    measured: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The outcomes of a cell's trials, by its text."""

    @classmethod
    def of(cls, name: str) -> Grid:
        """The grid, with what is kept of it."""
        words = [*GRIDS[name], *_COMMON]
        taken = taken_apart([*words, f"run_root={tempfile.gettempdir()}/ortlaunch-tune-grids"], ())
        space = Space(prepared(to_config(compose(taken.composed))), taken, hold=(THREADS, ALLOCATOR))
        assert len(space.cells) <= MOST_CELLS, len(space.cells)
        path = _path(name)
        kept = json.loads(path.read_text())["cells"] if path.exists() else {}
        return cls(name, space, {str(cell): list(filter(_counts, kept.get(str(cell), []))) for cell in space.cells})

    @property
    def work(self) -> float:
        """Samples of the whole run."""
        return float(self.space.asked.train.steps * self.space.batch)

    def missing(self) -> Iterator[tuple[int, Cell]]:
        """The rounds and cells that were not measured yet; which are near the best is seen round by round."""
        for number in range(max(ROUNDS, CLOSE_ROUNDS)):
            for cell in self.space.cells if number < ROUNDS else self.close():
                if len(self.measured[str(cell)]) <= number:
                    yield number, cell

    def close(self) -> list[Cell]:
        """The cells whose score is near the best one; none before all cells are measured."""
        if not all(self.measured.values()):
            return []
        least = _CLOSE * self.score(self.best())
        return [cell for cell in self.space.cells if self.score(cell) >= least]

    def measure(self, until: float = math.inf) -> bool:
        """Makes the trials that are missing, round by round; each is kept at once.

        Args:
            until: the time of `time.monotonic` from which on no trial is begun.

        Returns:
            Whether nothing is missing.
        """
        with tempfile.TemporaryDirectory(prefix="ortlaunch-tune-grid-") as name:
            folder = Path(name)
            for inner in ("ended", "tasks"):
                (folder / inner).mkdir()
            numbers = iter(range(10**6))
            trials = Trials(self.space, folder, None, lambda: next(numbers), lambda run: None)
            for number, cell in self.missing():
                if time.monotonic() >= until:
                    return False
                kept = self.measured[str(cell)]
                before = [one["rate"] for others in self.measured.values() for one in others if one["status"] == "ok"]
                rate = kept[-1]["rate"] if kept else statistics.median(before) if before else None
                one = self._trial(trials, cell, number, rate)
                if not _counts(one):
                    one = self._trial(trials, cell, number, one["rate"])
                if not _counts(one):
                    sys.exit(f"{cell}: other processes had {one['others']:.0%} of the cores: the machine is not idle")
                kept.append(one)
                self._keep()
                print(
                    f"{self.name} {number + 1}: {cell}: {one['rate']:,.1f} samples/s, {one['seconds']:.0f} s",
                    flush=True,
                )
        return True

    def _trial(self, trials: Trials, cell: Cell, number: int, rate: float | None) -> dict[str, Any]:
        """Measures a cell once, where `rate` is expected, and returns what is kept of it."""
        effort = Effort("round", number, SECONDS, rate or None, _TIMEOUT)
        outcome = trials.run(cell, effort)
        trained = steps_for(effort, self.space.batch) * self.space.batch / outcome.rate if outcome.ok else 0.0
        return {**outcome.to_json(), "run": "", "trained_seconds": trained}

    def _keep(self) -> None:
        _FOLDER.mkdir(exist_ok=True)
        here = machine()
        facts = {"processor": here["processor"], "cores": here["cores"], "versions": here["versions"]}
        content = {"measured": time.strftime("%Y-%m-%d"), **facts, "cells": self.measured}
        replace_text(_path(self.name), json.dumps(content, indent=1) + "\n")

    # What was measured, as a machine.

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

        pruner = Dominance(accumulates=lambda cell: self.space.accumulation(cell) > 1)
        plan = Plan(self.space.cells, self.space.cell, pruner, trial, budget, self.work, seed=seed)
        finding = Schedule(plan).run()
        assert finding.winner is not None
        best = self.best()
        share = self.score(finding.winner) / self.score(best)
        # A cell that was not reached was not pruned.
        is_pruned = finding.pruned.get(best, NO_TIME) not in (NO_TIME, NO_GAIN)
        # The rule about checkpointing keeps the same cell without it. What it loses is the difference of both.
        kept = best.having(**{CHECKPOINTING: OFF})
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


def _path(name: str) -> Path:
    return _FOLDER / f"{name}.json"


def _counts(kept: dict[str, Any]) -> bool:
    """Whether an outcome says how fast a cell is on an idle machine, or why it does not train."""
    return kept["status"] != "ok" or (kept["trained_seconds"] >= _LEAST_SECONDS and kept["others"] < _BUSY)


def _outcome(kept: dict[str, Any]) -> Outcome:
    return Outcome(**{key: value for key, value in kept.items() if key != "trained_seconds"})
