"""A made machine for the schedule of `ortlaunch tune`: speeds, memory, noise, failures and hangs, by a seed.

A trial costs what it would cost, in seconds that are only counted.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.search import Effort, Plan
from ortlaunch.tune.space import BACKEND, CHECKPOINTING, MICRO, OFF, ON, TRAINER, WORKERS, Cell, Value

AXES: dict[str, list[Value]] = {
    BACKEND: ["eager", "compile", "ort"],
    TRAINER: ["single", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"],
    MICRO: [2, 8, 32, 128, 512],
    CHECKPOINTING: [OFF, ON],
}
"""210 cells."""
START = 8.0
LIMIT = 16 * 2**30
_RECOMPUTED = math.log(0.75)


@dataclass
class Machine:
    """Every figure is a function of the seed; noise also depends on how many trials there were."""

    seed: int
    axes: dict[str, list[Value]] = field(default_factory=lambda: AXES)
    noise: float = 0.03
    """Standard deviation of the logarithm of a short trial's speed; longer ones have half of it."""
    failing: float = 0.02
    """Share of trials that fail by chance."""
    hanging: float = 0.01
    """Share of trials that hang until their time-out."""

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self._effects = {(axis, value): draw.gauss(0, 0.25) for axis, values in self.axes.items() for value in values}
        for value in self.axes.get(MICRO, []):
            # Larger micro-batches are faster up to a size, and a little slower beyond.
            self._effects[MICRO, value] = -0.06 * (math.log2(int(value)) - 5.5) ** 2 + draw.gauss(0, 0.03)
        pairs = itertools.combinations(self.axes, 2)
        self._joint = {
            ((one, left), (other, right)): draw.gauss(0, 0.1)
            for one, other in pairs
            for left in self.axes[one]
            for right in self.axes[other]
        }
        # To compute activations twice is never faster; only the share below speaks of it.
        for pair in list(self._joint):
            if CHECKPOINTING in dict(pair):
                self._joint[pair] = 0.0
        self._effects |= {(CHECKPOINTING, value): 0.0 for value in self.axes.get(CHECKPOINTING, [])}
        self._broken = {
            (backend, trainer)
            for backend in self.axes.get(BACKEND, [])
            for trainer in self.axes.get(TRAINER, [])
            if draw.random() < 0.15
        }
        self._chance = random.Random(self.seed + 1)
        self.cells = [
            Cell(tuple(zip(self.axes, values, strict=True))) for values in itertools.product(*self.axes.values())
        ]
        self.spent = 0.0
        self.trials: list[tuple[Cell, Effort]] = []
        # The first one is what is asked for, and trains.
        self.cells.insert(0, self.cells.pop(next(n for n, cell in enumerate(self.cells) if self.fits(cell))))

    def speed(self, cell: Cell) -> float:
        """The true speed of a cell."""
        log = math.log(100.0) + sum(self._effects[pair] for pair in cell.values)
        log += sum(self._joint[pair] for pair in itertools.combinations(cell.values, 2))
        return math.exp(log + (_RECOMPUTED if dict(cell.values).get(CHECKPOINTING) == ON else 0.0))

    def bytes(self, cell: Cell) -> int:
        """The memory of a cell."""
        axes = dict(cell.values)
        activations = int(axes.get(MICRO, 1)) * (0.03 if axes.get(CHECKPOINTING) == ON else 0.12)
        return int((2 + int(axes.get(WORKERS, 1)) * (0.2 + activations)) * 2**30)

    def fits(self, cell: Cell) -> bool:
        """Whether a cell trains, but for chance."""
        axes = dict(cell.values)
        return self.bytes(cell) <= LIMIT and (axes.get(BACKEND), axes.get(TRAINER)) not in self._broken

    def best(self) -> Cell:
        """The truly fastest cell that trains."""
        return max((cell for cell in self.cells if self.fits(cell)), key=self.speed)

    def trial(self, cell: Cell, effort: Effort) -> Outcome:
        """What a trial finds and costs."""
        self.trials.append((cell, effort))
        outcome = self._outcome(cell, effort)
        self.spent += outcome.seconds
        return outcome

    def _outcome(self, cell: Cell, effort: Effort) -> Outcome:
        if self.bytes(cell) > LIMIT:
            return Outcome("out of memory", START / 2, peak_bytes=LIMIT, reason="more than it may have")
        if not self.fits(cell) or self._chance.random() < self.failing:
            return Outcome("failed", START, reason="made to fail")
        if self._chance.random() < self.hanging:
            return Outcome("time-out", effort.timeout, reason="made to hang")
        noise = self.noise if effort.stage in ("probe", "short") else self.noise / 2
        rate = self.speed(cell) * math.exp(self._chance.gauss(0, noise))
        return Outcome("ok", START + effort.seconds, rate=rate, peak_bytes=self.bytes(cell))

    def plan(self, budget: float) -> Plan:
        """A plan over all cells, for the steady speed."""
        return Plan(self.cells, self.trial, budget, math.inf)
