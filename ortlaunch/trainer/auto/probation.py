"""The first steps of a run whose backend is not decided: they show how long the run takes, and whether trials pay."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch

from ortlaunch.base.free_memory import available
from ortlaunch.base.text import counted
from ortlaunch.config.schema import TrainConfig
from ortlaunch.trainer.auto.decision import Choice, Plan, Rate, as_now, conclude, plan_trials
from ortlaunch.trainer.auto.lives import is_first_start
from ortlaunch.trainer.auto.rates import UNSURE_PERCENT
from ortlaunch.trainer.auto.selection import Selection
from ortlaunch.trainer.auto.trial import FIRST, WARM_UP, steps_to_measure
from ortlaunch.trainer.auto.trials import tried
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.workers import Workers

_ROOM = 1.5
"""The free memory that a trial needs, in multiples of the memory that the workers have now."""


class Probation:
    """Decides the backend after the first steps, on every worker at the same step."""

    def __init__(
        self,
        selection: Selection,
        context: RunContext,
        start_step: int,
        is_stopped: Callable[[], bool],
        close: Callable[[], None],
    ) -> None:
        """
        Args:
            selection: the run's choice, which is not decided.
            context: this worker's view of the run.
            start_step: steps that are done already.
            is_stopped: whether this worker was asked to stop the run.
            close: ends what reads data, before the run begins again.
        """
        self._selection = selection
        self._context = context
        self._workers: Workers = context.workers
        self._start_step = start_step
        self._is_stopped = is_stopped
        self._close = close
        self._steps = context.config.train.steps - start_step
        self._latest = min(self._steps, _before_checkpoint(context.config.train, start_step))
        self._until = min(WARM_UP + FIRST, self._latest)
        """The step, counted from the start, after which the next part of the probation begins."""
        self._next: Callable[[int], None] = self._look
        self._began = time.perf_counter()
        self._start_seconds = 0.0
        self._seconds: list[float] = []
        self._before: list[float] = []
        """The step times before the trials; `_seconds` are those after them then."""
        self._known: dict[str, Rate] = {}

    def step_begins(self) -> None:
        """Marks the beginning of a step."""
        self._began = time.perf_counter()

    def step_ends(self, step: int) -> bool:
        """Decides where it is time to; all workers call it at the end of each step.

        Args:
            step: the number of the step, counted from 1.

        Returns:
            Whether it took time that belongs to no step. It does not return if the run begins again.
        """
        if self._selection.is_decided:
            return False
        done = step - self._start_step
        if self._workers.device.type == "cuda":
            torch.cuda.synchronize()
        if done == 1:
            self._start_seconds = time.time() - self._context.launched
        if done > WARM_UP:
            self._seconds.append(time.perf_counter() - self._began)
        if done < self._until:
            return False
        self._next(done)
        return True

    def close(self) -> None:
        """The run ends; it keeps the backend that it has."""
        if not self._selection.is_decided:
            self._settle("the run ended before a trial")

    def _look(self, done: int) -> None:
        """After a few steps: a run that is clearly too short is decided; others take more steps for a better figure."""
        if not self._seconds:
            what = "a run of" if done == self._steps else "a checkpoint after"
            self._settle(f"{what} {counted(done, 'step')} leaves none to measure")
            return
        short = self._selection.told("short", lambda: self._plan().reason)
        if short:
            self._settle(short)
            return
        more = self._selection.told("more", lambda: steps_to_measure(statistics.median(self._seconds)))
        self._next = self._try
        self._until = min(done + more, self._latest)
        if self._until == done:
            self._try(done)

    def _try(self, done: int) -> None:
        """Tries the other backends, if that pays; then measures as many steps again: a load may have changed."""
        values = self._selection.told("plan", lambda: dataclasses.asdict(self._plan()))
        plan = Plan(**{**values, "backends": tuple(values["backends"])})
        if plan.backends and not self._has_room():
            plan = Plan(reason="there is too little free memory for a trial of another backend")
        if plan.reason:
            self._settle(plan.reason)
        elif not plan.backends:
            self._known = as_now(self._selection.known(), self._selection.backend, self._measured())
            self._conclude(done)
        elif not self._tried(plan, done):
            self._settle("the run was asked to stop during the trials")
        else:
            self._before, self._seconds = self._seconds, []
            self._next = self._conclude
            self._until = min(done + len(self._before), self._latest)
            if self._until == done:
                self._conclude(done)

    def _conclude(self, done: int) -> None:
        """Settles the choice, or begins again with another backend."""
        selection = self._selection

        def chosen() -> dict[str, Any]:
            choice = conclude(selection.backend, self._measured(), done, self._steps, self._known, selection.refused)
            return dataclasses.asdict(choice)

        choice = Choice(**selection.told("concluded", chosen))
        if choice.backend == selection.backend:
            selection.settle(choice, self._context.journal)
        elif self._is_any_stopped():
            # The program that begins again would know nothing of a signal.
            self._settle("the run was asked to stop before it changed")
        else:
            self._close()
            selection.change(choice)

    def _tried(self, plan: Plan, done: int) -> bool:
        """Makes the trials; whether all that were begun were let to end, the same on all workers."""
        selection = self._selection
        self._known = as_now(selection.known(), selection.backend, self._measured())
        if self._workers.is_first:
            names = " and ".join(plan.backends)
            print(f"backend=auto tries {names} after {done} steps, for at most {plan.seconds:.0f} s", flush=True)
            selection.rates.note(selection.backend, self._noted(), busy_percent=UNSURE_PERCENT)
        ends = time.monotonic() + plan.seconds
        with self._context.watch.paused():
            for backend in plan.backends:
                left = float(selection.told(f"left-{backend}", lambda: ends - time.monotonic()))
                # After a slow trial, the next one may have too little time to start.
                if left < 0.9 * plan.least_seconds:
                    break
                rate = tried(selection, self._context.run, backend, left, self._is_stopped)
                if rate is not None:
                    self._known[backend] = rate
                    selection.rates.note(backend, rate, busy_percent=UNSURE_PERCENT)
                if not selection.told(f"ended-{backend}", partial(_is_there, rate)):
                    return False
        return True

    def _measured(self) -> Rate:
        # The faster of both times, so that a moment of load is no reason to change.
        medians = [statistics.median(seconds) for seconds in (self._before, self._seconds) if seconds]
        return Rate(step_seconds=min(medians), start_seconds=self._start_seconds)

    def _noted(self) -> Rate:
        """What is kept for other runs: without the start where an earlier life or attempt is a part of it."""
        if is_first_start(self._context.attempt, self._start_step):
            return self._measured()
        return dataclasses.replace(self._measured(), start_seconds=None)

    def _plan(self) -> Plan:
        selection = self._selection
        # The steps that are measured now are measured once more after the trials.
        spent = time.time() - self._context.launched + sum(self._seconds)
        return plan_trials(
            selection.backend, self._measured(), spent, self._steps, selection.known(), selection.refused
        )

    def _has_room(self) -> bool:
        """Whether every machine, within its control group, has room for the workers of a trial."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = _ROOM * psutil.Process().memory_info().rss * here
        return bool(self._workers.gather([float(available() > needed)]).min() > 0)

    def _is_any_stopped(self) -> bool:
        return bool(self._workers.gather([float(self._is_stopped())]).max() > 0)

    def _settle(self, reason: str) -> None:
        self._selection.settle(Choice(self._selection.backend, reason, is_final=True), self._context.journal)


def _is_there(rate: Rate | None) -> bool:
    return rate is not None


def _before_checkpoint(train: TrainConfig, start_step: int) -> int:
    """The steps until the first checkpoint is written, which a run that begins again must not find."""
    every = train.checkpoint_every
    return train.steps if every is None else every - start_step % every
