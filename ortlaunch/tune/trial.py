"""The trials of a search: a cell as an ordinary run of fewer steps, in the sweep's folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ortlaunch.config.schema import Config
from ortlaunch.launch.planning import default_name
from ortlaunch.launch.trial import Limits, Outcome, run_of, short, tried
from ortlaunch.run.sweep import SweepTask
from ortlaunch.tune.cell import Cell, Effort
from ortlaunch.tune.pruning import CHECKPOINTING, MICRO, ON
from ortlaunch.tune.space import Space
from ortlaunch.tune.words import TRAINER, WORKERS

_LEAST_STEPS, _MOST_STEPS = 6, 20_000
"""Steps that count for the speed. Six are few; a model of seconds a step has no time for more."""
_WINDOWS = 12


@dataclass
class Trials:
    """Runs trials one after the other."""

    space: Space
    folder: Path
    """The sweep's folder."""
    limit: int | None
    """Bytes that a trial may take; None for no limit."""
    number: Callable[[], int]
    """The next number of a run in the sweep."""
    started: Callable[[Path], None]
    """Takes each run folder."""

    def run(self, cell: Cell, effort: Effort) -> Outcome:
        """Runs one trial to its end, and once more where the machine has failed."""
        outcome = self._run_once(cell, effort)
        if not outcome.is_of_machine:
            return outcome
        again = self._run_once(cell, effort)
        return replace(again, seconds=outcome.seconds + again.seconds)

    def _run_once(self, cell: Cell, effort: Effort) -> Outcome:
        number = self.number()
        folder = self.folder / "trials" / str(number)
        outcome = tried(
            self.trained(cell, effort),
            Limits(effort.timeout, self.limit),
            folder,
            seconds=effort.seconds,
            sweep=SweepTask(self.folder, number),
            words=self.space.overrides(cell),
        )
        run = run_of(folder)
        if run is not None and run.is_dir():
            self.started(run)
        return outcome

    def trained(self, cell: Cell, effort: Effort) -> Config:
        """The configuration of a trial."""
        config = self.space.configured(cell)
        steps = steps_for(effort, self.space.global_batch(cell))
        return replace(short(config, steps, log_every=max(1, steps // _WINDOWS)), name=_name(config, cell))


def steps_for(effort: Effort, batch: int) -> int:
    """Steps that take the wanted seconds at the expected speed.

    Args:
        effort: what is wanted and expected.
        batch: samples of a step.
    """
    if not effort.rate or not effort.seconds:
        return _LEAST_STEPS
    return min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(effort.seconds * effort.rate / batch)))


def _name(config: Config, cell: Cell) -> str:
    """A run's name, which shows the axes that the default name does not."""
    checkpointed = "-checkpointing" if cell[CHECKPOINTING] == ON else ""
    variant = f"-{str(cell[TRAINER]).partition('-')[2]}" if "-" in str(cell[TRAINER]) else ""
    return f"{default_name(config)}{variant}-w{cell[WORKERS]}-b{cell[MICRO]}{checkpointed}"
