"""A trial is an ordinary run of fewer steps, in the sweep's folder, and what its journal says is the outcome."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortlaunch.base.programs import module_command
from ortlaunch.base.reading import read_text
from ortlaunch.config.load import save_config
from ortlaunch.config.schema import Config, MemoryCheck
from ortlaunch.launch.planning import default_name
from ortlaunch.run.events import Event, Measured, WorkerFailed
from ortlaunch.run.failure import gist_of
from ortlaunch.run.journal import iterate
from ortlaunch.run.run import Run
from ortlaunch.run.state import ENDED_TAG, RunState
from ortlaunch.tracking import trackers
from ortlaunch.tune.cell import MOST_OF_CORES, Cell, Effort, Outcome, Status
from ortlaunch.tune.process import CONFIG, REFUSED, REQUEST, RUN
from ortlaunch.tune.pruning import CHECKPOINTING, MICRO, ON
from ortlaunch.tune.space import Space
from ortlaunch.tune.watched import Watched, watch
from ortlaunch.tune.words import TRAINER, WORKERS

_LEAST_STEPS, _MOST_STEPS = 6, 20_000
"""Steps that count for the speed. Six are few; a model of seconds a step has no time for more."""
_WINDOWS = 12
_LEAST_WINDOWS = 3
_ENOUGH = 2.5
"""A trial that has measured this many times as long as was wanted is ended: it is slower than was expected."""
_ENOUGH_SAID = "ortlaunch tune ended it: it had measured long enough"
_GRACE_SECONDS = 1
"""A trial has nothing to save. When the search is killed, its trial must not go on beside what is started then."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "MemoryError")
_OF_MACHINE = (
    *map(os.strerror, (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)),
    *map(os.strerror, (errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN)),
    "devices are busy or unavailable",
)
"""Signs that something on the machine was taken or broken, which has nothing to do with what is tried."""
_STEP, _NOW = "throughput/step_seconds", "throughput/samples_per_second"
_P50, _RATE = "summary/step_seconds_p50", "summary/samples_per_second_median"


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
        config = self.trained(cell, effort)
        number = self.number()
        folder = self.folder / "trials" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        save_config(trackers.public(config), folder / CONFIG)
        request = {"sweep": str(self.folder), "number": number, "overrides": self.space.overrides(cell)}
        (folder / REQUEST).write_text(json.dumps(request))
        command = [*module_command("ortlaunch.tune.process"), str(folder)]
        variables = trackers.environment(config)
        watched = watch(
            command, folder / "log", variables, self.limit, effort.timeout, lambda: _ends_early(folder, effort)
        )
        run = _run_of(folder)
        if run is not None and run.is_dir():
            self.started(run)
        refused = read_text(folder / REFUSED) if (folder / REFUSED).is_file() else ""
        return outcome_of(watched, run, config.train.steady_after, effort, self.limit, refused)

    def trained(self, cell: Cell, effort: Effort) -> Config:
        """The configuration of a trial: the cell's, with fewer steps, and without what only long runs need."""
        config = self.space.configured(cell)
        steps = config.train.steady_after + steps_for(effort, self.space.global_batch(cell))
        train = replace(
            config.train,
            steps=steps,
            log_every=max(1, (steps - config.train.steady_after) // _WINDOWS),
            eval_every=None,
            checkpoint_every=None,
            save_weights=False,
            resume="never",
            # Its estimate would run beside the steps that are measured, and the limit of a trial is watched anyway.
            memory_check=MemoryCheck.off,
        )
        launcher = replace(config.launcher, max_restarts=0, grace_seconds=_GRACE_SECONDS)
        return replace(config, train=train, launcher=launcher, profile=None, name=_name(config, cell))


def steps_for(effort: Effort, batch: int) -> int:
    """Steps that take the wanted seconds at the expected speed.

    Args:
        effort: what is wanted and expected.
        batch: samples of a step.
    """
    if not effort.rate or not effort.seconds:
        return _LEAST_STEPS
    return min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(effort.seconds * effort.rate / batch)))


def outcome_of(
    watched: Watched, run: Path | None, steady_after: int, effort: Effort, limit: int | None, refused: str = ""
) -> Outcome:
    """Reads what a trial found.

    Args:
        watched: how its process ended.
        run: its run folder; None if it made none.
        steady_after: its first steps, which count as its start.
        effort: how long it was to take.
        limit: bytes that it was allowed.
        refused: why it was refused; empty if it was not.
    """
    state, slow, before = RunState(), 0.0, 0
    failures: list[str] = [refused] if refused else []
    for event in _events(run):
        state.take(event)
        if isinstance(event, WorkerFailed):
            failures.append(event.message)
        if isinstance(event, Measured) and event.is_log_step and event.step <= steady_after:
            slow += event.values.get(_STEP, 0.0) * (event.step - before)
            before = event.step
    found: dict[str, Any] = {"seconds": watched.seconds, "peak_bytes": watched.peak_bytes, "others": watched.others}
    rate, step = state.figures.get(_RATE), state.figures.get(_P50)
    path = str(run) if run is not None else ""
    steady = _steady(run)
    if watched.ended == "enough" and len(steady) >= _LEAST_WINDOWS:
        rate = statistics.median(event.values[_NOW] for event in steady)
        step = statistics.median(event.values[_STEP] for event in steady)
    has_ended = watched.ended == "enough" or (watched.ended == "by itself" and watched.code == 0)
    if has_ended and rate and step:
        check, export = (state.figures.get(f"startup/ort_{one}_seconds", 0.0) for one in ("check", "export"))
        # An export is made before the first step or in it; in it, the step's own time has it already.
        start = check + max(slow - before * step, export)
        return Outcome("ok", rate=rate, start=start, run=path, **found)
    status, reason = _failure(watched, failures, effort, limit)
    is_of_machine = status == "failed" and any(sign in message for message in failures[:1] for sign in _OF_MACHINE)
    return Outcome(status, reason=reason, run=path, is_of_machine=is_of_machine, **found)


def _ends_early(folder: Path, effort: Effort) -> bool:
    """Whether a trial is to be ended because it has measured enough, which its journal then says."""
    run = _run_of(folder)
    if run is None or not _is_enough(run, effort):
        return False
    with suppress(OSError), Run(run).journal() as journal:
        journal.tags({ENDED_TAG: _ENOUGH_SAID})
    return True


def _is_enough(run: Path, effort: Effort) -> bool:
    """Whether a trial that is slower than expected has measured for as long as was wanted, and a little longer."""
    if not effort.seconds:
        return False
    steady, before = _steady(run), 0
    if len(steady) < _LEAST_WINDOWS:
        return False
    seconds = 0.0
    for event in steady:
        steps = event.step - before if before else 1
        seconds += event.values[_STEP] * steps
        before = event.step
    return seconds > _ENOUGH * effort.seconds


def _steady(run: Path | None) -> list[Measured]:
    """The windows of a run that count for its speed."""
    return [
        event
        for event in _events(run)
        if isinstance(event, Measured)
        and event.values.get("throughput/steady")
        and {_NOW, _STEP} <= event.values.keys()
    ]


def _events(run: Path | None) -> Iterator[Event]:
    if run is not None and Run(run).journal_file.is_file():
        yield from iterate(Run(run).journal_file)


def _run_of(folder: Path) -> Path | None:
    """The run folder of a trial; None before it has one."""
    file = folder / RUN
    text = read_text(file).strip() if file.is_file() else ""
    return Path(text) if text else None


def _failure(watched: Watched, failures: list[str], effort: Effort, limit: int | None) -> tuple[Status, str]:
    """The status of a trial without a speed, and why it has none, in one line."""
    if watched.ended == "out of memory" and limit is not None:
        return "out of memory", f"more than the {limit / 2**30:.2f} GiB it may have"
    if watched.ended == "time-out":
        is_busy = watched.others >= MOST_OF_CORES
        busy = f", while other processes had {watched.others:.0%} of the cores" if is_busy else ""
        return "time-out", f"not done after {effort.timeout:.0f} s{busy}"
    for message in failures:
        line = next((line.strip() for line in message.splitlines() if any(sign in line for sign in _NO_MEMORY)), None)
        if line is not None:
            return "out of memory", line
    if failures and failures[0].strip():
        return "failed", gist_of(failures[0]).strip()
    if watched.ended == "by itself" and watched.code == -signal.SIGKILL:
        return "out of memory", "the launcher was ended by SIGKILL (out of memory?)"
    return "failed", f"ended with {watched.code}"


def _name(config: Config, cell: Cell) -> str:
    """A run's name, which shows the axes that the default name does not."""
    checkpointed = "-checkpointing" if cell[CHECKPOINTING] == ON else ""
    variant = f"-{str(cell[TRAINER]).partition('-')[2]}" if "-" in str(cell[TRAINER]) else ""
    return f"{default_name(config)}{variant}-w{cell[WORKERS]}-b{cell[MICRO]}{checkpointed}"
