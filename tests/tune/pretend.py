"""The process of a tuning with pretend trials, which a test kills: ``python -m tests.tune.pretend FOLDER COUNT``."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.folder import TuneFolder
from ortlaunch.tune.search import Effort, Finding, Search
from ortlaunch.tune.space import BACKEND, MICRO, WORKERS, Cell, Space, Value
from tests.tune.objective import Machine

BUDGET = 900.0
WORDS = ("model=mlp", "device=cpu", "backend=eager", "trainer=single", "tracking=none")
AXES: dict[str, list[Value]] = {BACKEND: ["eager", "compile", "ort"], WORKERS: [1, 2, 4], MICRO: [1, 2, 4, 8]}


class Pretended(TuneFolder):
    """A folder whose trials are those of a small made machine without chance; after some, each takes ten minutes."""

    machine: Machine
    quick: float

    def made(self, cell: Cell, effort: Effort) -> Outcome:
        """A trial that gives the same whenever it is made."""
        if len(self.machine.trials) >= self.quick:
            time.sleep(600)
        print(f"{effort.stage} {effort.number} {cell}", flush=True)
        return self.machine.trial(cell, effort)


def searched(folder: Path, quick: float = math.inf, budget: float = BUDGET) -> tuple[Finding, Pretended]:
    """A whole search with its notes in a folder."""
    pretended = Pretended(Space([*WORDS, f"run_root={folder}"]), 2**30)
    pretended.machine, pretended.quick = Machine(5, AXES, noise=0.0, failing=0.0, hanging=0.0), quick
    pretended.make()
    pretended.open(["tune"], anew=False)
    plan = pretended.machine.plan(budget)
    plan.trial = pretended.trial
    return Search(plan).run(), pretended


if __name__ == "__main__":
    searched(Path(sys.argv[1]), int(sys.argv[2]))
