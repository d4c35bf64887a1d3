"""Switches a run's watches off and on again while it trains, for ``make bench-overhead``.

The workers of that benchmark import this module (``model.imports``). The steps are divided into turns. In every other
turn all is as by default; between them one row applies. The turns follow from the number of the step alone, so all
workers switch at the same step. The first worker notes how long each turn has taken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from ortlaunch.metrics.stragglers import OwnTime
from ortlaunch.metrics.system import Sampler
from ortlaunch.metrics.throughput import StepClock
from ortlaunch.ort.mends.decisions import Decisions
from ortlaunch.run.run import Run
from ortlaunch.trainer import backend_run
from ortlaunch.trainer.guard import Guard
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.session import Session
from ortlaunch.trainer.stop import StopRequests
from ortlaunch.trainer.watch import Watch

NOTES = "turns.jsonl"
"""The file in the run folder that the turns are noted in."""
CHOSEN = "ORTLAUNCH_BENCH_ROWS"
"""The variable with the rows that are measured, in JSON."""
TURN_STEPS = 10
"""One log step with the default ``train.log_every=10``."""
WARM_STEPS = 4 * TURN_STEPS

DEFAULT = "default"
LAUNCHER = "launcher: relay to MLflow, display, presence"
ALL = "all of these"
EVERY_STEP = "train.log_every=1"
COMPARISON = "one comparison of the gradients with PyTorch"
WATCHES = {
    "loss and gradients that are not finite": {"guard"},
    "figures at log steps, and the journal": {"figures", "clock"},
    "each worker's own time (stragglers)": {"own time"},
    "samples of the machine": {"samples"},
    "signs of life, and the watch for hangs": {"beats"},
    "agreement on requests to stop": {"stop"},
    "decisions that the graph has frozen": {"decisions"},
    LAUNCHER: {"launcher"},
}
"""What is switched off, by the row's name."""
ROWS = {**WATCHES, ALL: set().union(*WATCHES.values()), EVERY_STEP: {"every step"}, COMPARISON: {"comparison"}}


@dataclass(frozen=True)
class Turn:
    """What is switched in a turn, and how long it lasts."""

    row: str
    switched: frozenset[str]
    steps: int
    left_out: int
    """First steps of the turn that do not count, because something of the turn before is still being done in them."""


def turns_of_round(number: int, rows: list[str]) -> list[Turn]:
    """A round: each row between two turns with the defaults, each round in another order.

    In the same order, what is done every few seconds would meet the same rows again and again.
    """
    found = []
    for row in random.Random(number).sample(rows, len(rows)):
        switched = ROWS[row]
        # The relay sends every five seconds, and what it could not send when it goes on.
        is_long = "launcher" in switched
        length = (5 * TURN_STEPS, TURN_STEPS) if is_long else (TURN_STEPS, 0)
        found.append(Turn(DEFAULT, frozenset(), *length))
        found.append(Turn(row, frozenset(switched), *length))
        found.append(Turn(DEFAULT, frozenset(), *length))
    return found


_RUN = Run(Path(sys.argv[-1]))
"""The worker's run: it is started with the run folder as its last word."""


def steps_per_round(rows: list[str]) -> int:
    """The steps of a round."""
    return sum(turn.steps for turn in turns_of_round(0, rows))


class _Turns:
    """The turn that this worker is in."""

    def __init__(self) -> None:
        self._rows = json.loads(os.environ.get(CHOSEN, "[]"))
        self._turns: Iterator[Turn] = chain.from_iterable(turns_of_round(round_, self._rows) for round_ in count())
        self._turn: Turn | None = None
        self._ends = WARM_STEPS
        self._counts_from = 0
        self._begun = 0.0
        self.step = 0
        self.switched: frozenset[str] = frozenset()

    def step_ends(self, step: int, *, is_first: bool) -> None:
        """Called at the end of each step; begins the next turn where one is due."""
        self.step = step
        if step == self._counts_from:
            self._begun = time.perf_counter()
        if step < self._ends:
            return
        if is_first and self._turn is not None:
            seconds = (time.perf_counter() - self._begun) / (self._turn.steps - self._turn.left_out)
            with (_RUN.path / NOTES).open("a") as notes:
                notes.write(json.dumps({"row": self._turn.row, "step_seconds": seconds}) + "\n")
        self._turn = turn = next(self._turns)
        if is_first:
            _switch_launcher(on="launcher" not in turn.switched)
        self.switched = turn.switched
        self._ends, self._counts_from = step + turn.steps, step + turn.left_out
        self._begun = time.perf_counter()

    @property
    def is_middle(self) -> bool:
        """Whether the current step is in the middle of its turn."""
        return self._ends - self.step == TURN_STEPS // 2


_turns = _Turns()


def _switch_launcher(*, on: bool) -> None:
    launcher = _RUN.launcher()
    assert launcher is not None, "the run folder does not name its launcher"
    os.kill(launcher.pid, signal.SIGCONT if on else signal.SIGSTOP)


def _switch(owner: Any, name: str, switch: str, instead: Callable[..., Any] = lambda *_, **__: None) -> None:
    """Makes a function of a class or module another one while `switch` is switched."""
    usual = getattr(owner, name)

    def chosen(*arguments: Any, **named: Any) -> Any:
        return (instead if switch in _turns.switched else usual)(*arguments, **named)

    setattr(owner, name, chosen)


def _note_step(session: Session, step: int) -> bool:
    saves = _saves(session, step)
    _turns.step_ends(step, is_first=os.environ["RANK"] == "0")
    return saves


def _not_asked(requests: StopRequests) -> bool:
    requests.close()
    requests._steps_left = 1
    return False


_saves = Session.saves


def install() -> None:
    """Puts the switches into the classes that this worker uses."""
    Session.saves = _note_step  # type: ignore[method-assign]
    _switch(Guard, "watch", "guard", lambda _guard, loss: loss)
    _switch(Guard, "check_gradients", "guard")
    _switch(Recorder, "is_log_step", "figures", lambda *_: False)
    _switch(Recorder, "is_log_step", "every step", lambda *_: True)
    _switch(StepClock, "step_done", "clock")
    _switch(OwnTime, "begin", "own time")
    _switch(OwnTime, "end", "own time")
    _switch(Sampler, "sample", "samples", lambda *_: False)
    for name in ("beat", "_write", "_leave_if_lost"):
        _switch(Watch, name, "beats")
    _switch(StopRequests, "agreed", "stop", _not_asked)
    _switch(Decisions, "compare", "decisions")
    # By default, comparisons are too rare for a turn to show them: they are made in their own row alone.
    backend_run._is_due = lambda *_: "comparison" in _turns.switched and _turns.is_middle


if Path(sys.argv[0]).name == "worker.py":
    install()
