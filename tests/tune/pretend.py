"""The process of a tuning with pretend trials, which a test kills: ``python -m tests.tune.pretend FILE COUNT``."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell, Effort, Value
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.plan import Finding
from ortlaunch.tune.schedule import Schedule
from tests.tune.objective import Machine

BUDGET = 900.0
AXES: dict[str, list[Value]] = {
    "backend": ["eager", "compile", "ort"],
    "workers": [1, 2, 4],
    "micro_batch": [1, 2, 4, 8],
}


def machine() -> Machine:
    """A small made machine without noise by chance, so that a trial gives the same whenever it is made."""
    return Machine(5, AXES, noise=0.0, failing=0.0, hanging=0.0)


def searched(notes: Path, quick: float = math.inf) -> tuple[Finding, Machine]:
    """A whole search with its notes in a file; each trial after the first `quick` ones takes ten minutes."""
    made = machine()
    plan = made.plan(BUDGET)

    def trial(cell: Cell, effort: Effort) -> Outcome:
        if len(made.trials) >= quick:
            time.sleep(600)
        print(f"{effort.stage} {effort.number} {cell}", flush=True)
        return made.trial(cell, effort)

    plan.trial = Notes(notes).remembered(trial)
    return Schedule(plan).run(), made


if __name__ == "__main__":
    searched(Path(sys.argv[1]), int(sys.argv[2]))
