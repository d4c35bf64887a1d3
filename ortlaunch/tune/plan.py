"""What a schedule needs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell, Effort
from ortlaunch.tune.intervals import Interval
from ortlaunch.tune.pruning import Pruner

Trial = Callable[[Cell, Effort], Outcome]


@dataclass
class Plan:
    """What a schedule needs."""

    cells: Sequence[Cell]
    """All cells that the rules allow, each once."""
    asked: Cell
    """The configuration as asked, which is one of them."""
    pruner: Pruner
    trial: Trial
    budget: float
    """Seconds that all trials may take together."""
    work: float
    """Samples of the whole run, over which the start of a backend counts; infinite for the steady speed alone."""
    unfit: Callable[[Cell], str | None] = lambda cell: None
    """Why a winner must not be used although it is fast; None if it may be. It is asked of the winner only."""
    estimated: Callable[[Cell, dict[Cell, Outcome]], str | None] = lambda cell, seen: None
    """Why a cell that is about to be tried cannot fit into the memory; None if it may."""
    beside: Callable[[], float] = lambda: 0.0
    """Seconds spent so far on what is no trial, such as estimates."""
    short_seconds: float = 2.0
    long_seconds: float = 6.0
    seed: int = 0


@dataclass
class Finding:
    """The end of a schedule."""

    winner: Cell | None
    """The fastest cell; None if none trained."""
    ties: list[Cell] = field(default_factory=list)
    """Cells that the rounds could not part from the winner."""
    measured: dict[Cell, list[Outcome]] = field(default_factory=dict)
    """All outcomes of each cell, in their order."""
    pruned: dict[Cell, str] = field(default_factory=dict)
    """Why a cell was not tried."""
    dropped: dict[Cell, str] = field(default_factory=dict)
    """Why a cell that was tried is not the winner."""
    score: float = 0.0
    """The winner's score, measured once more."""
    interval: Interval | None = None
    """Of the winner's score, from its rounds and the last trial; None for less than three values."""
    asked_score: float = 0.0
    """The score of the configuration as asked, measured beside the winner; 0 if it did not train."""
    rounds: dict[Cell, list[float]] = field(default_factory=dict)
    """The logarithms of a cell's scores in the rounds, and in the trial after them."""
    spent: float = 0.0
    """Seconds of all trials together."""
