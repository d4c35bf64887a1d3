"""A trial: an ordinary run of a few steps in a process of its own, within limits; its journal says what came of it.

``python -m ortlaunch.launch.trial FOLDER`` is that process. It reads ``config.yaml`` and ``request.json`` there,
launches the run as `ortlaunch run` does, and writes the run folder's path to ``run``.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.programs import module_command
from ortlaunch.base.reading import read_text
from ortlaunch.config.load import load_config, save_config
from ortlaunch.config.schema import Config, EvalConfig, MemoryCheck
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.watched import Watched, watch
from ortlaunch.run import failure
from ortlaunch.run.events import Event, Measured, WorkerFailed
from ortlaunch.run.journal import iterate
from ortlaunch.run.run import Run
from ortlaunch.run.state import ENDED_TAG, FIRST_STEP, RunState
from ortlaunch.run.sweep import SweepTask
from ortlaunch.tracking import trackers

Status = Literal["ok", "out of memory", "time-out", "refused", "failed"]

CONFIG, REQUEST, RUN, REFUSED = "config.yaml", "request.json", "run", "refused.txt"
"""Files of a trial's folder: what is asked for, the run folder's path, and why the run was refused."""
_LEAST_WINDOWS = 3
_ENOUGH = 2.5
"""A trial that has measured this many times as long as was wanted is ended: it is slower than was expected."""
_ENOUGH_SAID = "its trial was ended: it had measured long enough"
_GRACE_SECONDS = 1
"""A trial has nothing to save. When what wants it is killed, it must not go on beside what is started then."""
_MOST_OF_CORES = 0.5
"""With this share of the cores in other hands, a time-out says little about what was tried."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "MemoryError")
_OF_MACHINE = (
    *map(os.strerror, (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)),
    *map(os.strerror, (errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN)),
    "devices are busy or unavailable",
)
"""Signs that something on the machine was taken or broken, which has nothing to do with what is tried."""
_STEP, _NOW = "throughput/step_seconds", "throughput/samples_per_second"
_PEAKS = ("summary/peak_memory_gib", "memory/peak_allocated_gib", "memory/rss_gib")
"""The best figure first: a trial that is ended early has no summary."""
_P50, _RATE = "summary/step_seconds_p50", "summary/samples_per_second_median"


@dataclass(frozen=True)
class Limits:
    """What a trial may take."""

    seconds: float
    """Seconds after which it is ended."""
    bytes: int | None = None
    """Memory of all its processes together; None for no limit."""


@dataclass(frozen=True)
class Outcome:
    """What a trial found. Running out of memory and not ending in time are results as good as a speed."""

    status: Status
    seconds: float
    """Seconds that the trial took, with its start."""
    rate: float = 0.0
    """Samples of all workers in a second, once the speed is steady."""
    start: float = 0.0
    """Seconds that export, compilation and slow first steps take beyond those of steady steps."""
    first_step: float = 0.0
    """Seconds from the launch to the end of the first step."""
    worker_bytes: int = 0
    """The largest memory of a worker: resident, or on its GPU."""
    peak_bytes: int = 0
    """The largest memory that the trial's processes had together."""
    others: float = 0.0
    """Share of the cores that a run may use which other processes had meanwhile, from 0 to 1."""
    reason: str = ""
    """Why there is no speed."""
    run: str = ""
    """The run folder."""
    is_of_machine: bool = False
    """Whether the machine failed and not the configuration, which may train in another trial."""
    is_noted: bool = field(default=False, compare=False)
    """Whether it was measured before a search was interrupted, and is not measured again."""

    @property
    def ok(self) -> bool:
        """Whether there is a speed."""
        return self.status == "ok"

    @property
    def is_late_by_others(self) -> bool:
        """Whether it did not end in time while other processes had most of the cores."""
        return self.status == "time-out" and self.others >= _MOST_OF_CORES

    def score(self, work: float) -> float:
        """Samples per second over a whole run, with the start that its backend costs.

        Args:
            work: samples of the whole run; infinite for the steady speed alone.
        """
        if not self.ok or self.rate <= 0:
            return 0.0
        return self.rate if math.isinf(work) else work / (self.start + work / self.rate)

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain values, without where this object is from."""
        return {name: value for name, value in asdict(self).items() if name != "is_noted"}


def short(config: Config, steps: int, *, log_every: int) -> Config:
    """The configuration of a trial: the same run with fewer steps, and without what only long runs need.

    Args:
        config: the configuration to try.
        steps: the steps that count for the speed; those before them come in addition.
        log_every: the steps of a window; a trial may end once three windows are measured.
    """
    train = dataclasses.replace(
        config.train,
        steps=config.train.steady_after + steps,
        epochs=None,
        tokens=None,
        log_every=log_every,
        eval_every=None,
        checkpoint_every=None,
        save_weights=False,
        resume="never",
        hooks=[],
        best=None,
        patience=None,
        # Its estimate would run beside the steps that are measured, and the limit of a trial is watched anyway.
        memory_check=MemoryCheck.off,
    )
    launcher = dataclasses.replace(config.launcher, max_restarts=0, grace_seconds=_GRACE_SECONDS)
    return dataclasses.replace(config, train=train, eval=EvalConfig(), launcher=launcher, profile=None)


def tried(
    config: Config,
    limits: Limits,
    folder: Path,
    *,
    seconds: float,
    sweep: SweepTask | None = None,
    words: Sequence[str] = (),
) -> Outcome:
    """Runs a trial to its end.

    Args:
        config: its configuration, as `short` makes it.
        limits: what it may take.
        folder: takes its files; it is made.
        seconds: the seconds of steady steps that are wanted. It is asked to end when it has measured clearly more; 0
            lets it take all steps.
        sweep: its place in a sweep; None for none.
        words: the command line after ``ortlaunch``, for its record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_config(trackers.public(config), folder / CONFIG)
    task = None if sweep is None else {"sweep": str(sweep.folder), "number": sweep.number}
    (folder / REQUEST).write_text(json.dumps({"task": task, "overrides": list(words)}))
    watched = watch(
        [*module_command("ortlaunch.launch.trial"), str(folder)],
        folder / "log",
        trackers.environment(config),
        limits.bytes,
        limits.seconds,
        lambda: _ends_early(folder, seconds),
    )
    refused = read_text(folder / REFUSED) if (folder / REFUSED).is_file() else ""
    return outcome_of(watched, run_of(folder), config.train.steady_after, limits, refused)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends what is inside the block by an exception where SIGTERM or SIGHUP asks for it, so that its trial ends too."""
    before = {
        number: signal.signal(number, _end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(exit_codes.stopped_by(number))


def run_of(folder: Path) -> Path | None:
    """The run folder of a trial; None before it has one."""
    file = folder / RUN
    text = read_text(file).strip() if file.is_file() else ""
    return Path(text) if text else None


def outcome_of(watched: Watched, run: Path | None, steady_after: int, limits: Limits, refused: str = "") -> Outcome:
    """Reads what a trial found.

    Args:
        watched: how its process ended.
        run: its run folder; None if it made none.
        steady_after: its first steps, which count as its start.
        limits: what it was allowed.
        refused: why it was refused; empty if it was not.
    """
    state, slow, before = RunState(), 0.0, 0
    messages: list[str] = [refused] if refused else []
    for event in _events(run):
        state.take(event)
        if isinstance(event, WorkerFailed):
            messages.append(event.message)
        if isinstance(event, Measured) and event.is_log_step and event.step <= steady_after:
            slow += event.values.get(_STEP, 0.0) * (event.step - before)
            before = event.step
    found: dict[str, Any] = {"seconds": watched.seconds, "peak_bytes": watched.peak_bytes, "others": watched.others}
    found |= {"run": str(run) if run is not None else "", "first_step": state.figures.get(FIRST_STEP, 0.0)}
    found["worker_bytes"] = int(next((state.figures[name] for name in _PEAKS if name in state.figures), 0.0) * 2**30)
    rate, step = state.figures.get(_RATE), state.figures.get(_P50)
    steady = _steady(run)
    if watched.ended == "enough" and len(steady) >= _LEAST_WINDOWS:
        rate = statistics.median(event.values[_NOW] for event in steady)
        step = statistics.median(event.values[_STEP] for event in steady)
    has_ended = watched.ended == "enough" or (watched.ended == "by itself" and watched.code == 0)
    if has_ended and rate and step:
        check, export = (state.figures.get(f"startup/ort_{one}_seconds", 0.0) for one in ("check", "export"))
        # An export is made before the first step or in it; in it, the step's own time has it already.
        start = check + max(slow - before * step, export)
        return Outcome("ok", rate=rate, start=start, **found)
    status, reason = _failure(watched, messages, limits)
    is_of_machine = status == "failed" and any(sign in message for message in messages[:1] for sign in _OF_MACHINE)
    if status == "failed" and refused and not is_of_machine:
        status = "refused"
    return Outcome(status, reason=reason, is_of_machine=is_of_machine, **found)


def _ends_early(folder: Path, seconds: float) -> bool:
    """Whether a trial is to be ended because it has measured enough, which its journal then says."""
    run = run_of(folder)
    if run is None or not _is_enough(run, seconds):
        return False
    with suppress(OSError), Run(run).journal() as journal:
        journal.tags({ENDED_TAG: _ENOUGH_SAID})
    return True


def _is_enough(run: Path, wanted: float) -> bool:
    """Whether a trial that is slower than expected has measured for as long as was wanted, and a little longer."""
    if not wanted:
        return False
    steady, before = _steady(run), 0
    if len(steady) < _LEAST_WINDOWS:
        return False
    seconds = 0.0
    for event in steady:
        steps = event.step - before if before else 1
        seconds += event.values[_STEP] * steps
        before = event.step
    return seconds > _ENOUGH * wanted


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


def _failure(watched: Watched, messages: list[str], limits: Limits) -> tuple[Status, str]:
    """The status of a trial without a speed, and why it has none, in one line."""
    if watched.ended == "out of memory" and limits.bytes is not None:
        return "out of memory", f"more than the {limits.bytes / 2**30:.2f} GiB it may have"
    if watched.ended == "time-out":
        is_busy = watched.others >= _MOST_OF_CORES
        busy = f", while other processes had {watched.others:.0%} of the cores" if is_busy else ""
        return "time-out", f"not done after {limits.seconds:.0f} s{busy}"
    for message in messages:
        line = next((line.strip() for line in message.splitlines() if any(sign in line for sign in _NO_MEMORY)), None)
        if line is not None:
            return "out of memory", line
    if messages and messages[0].strip():
        return "failed", failure.gist_of(messages[0]).strip()
    if watched.ended == "by itself" and watched.code == -signal.SIGKILL:
        return "out of memory", "the launcher was ended by SIGKILL (out of memory?)"
    return "failed", f"ended with {watched.code}"


def main() -> None:
    """Launches the run of the folder and exits with its code."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text())
    try:
        config = trackers.with_credentials(load_config(folder / CONFIG), os.environ)
        plan = make_plan(config, arguments=request["overrides"])
        if (task := request["task"]) is not None:
            plan = dataclasses.replace(plan, sweep=SweepTask(Path(task["sweep"]), int(task["number"])))
        # What wants the trial looks at it several times a second.
        replace_text(folder / RUN, str(plan.run_dir))
        code = launcher_of(config).submit(plan)
        if code == exit_codes.REQUEST and (failed := failure.first(plan.run_dir)) is not None:
            # A worker has refused it, such as a model that cannot checkpoint its activations.
            replace_text(folder / REFUSED, failed.message)
    except RequestError as error:
        replace_text(folder / REFUSED, str(error))
        code = exit_codes.REQUEST
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
