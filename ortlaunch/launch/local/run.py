"""Runs a plan on this machine: writes the run folder, starts torchrun, watches it, and prints how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Config, LauncherConfig, LocalConfig
from ortlaunch.launch.folder import journal_start, restore_configuration, write_run_folder
from ortlaunch.launch.local import machines
from ortlaunch.launch.local.display import Display
from ortlaunch.launch.local.workers import WorkerGroup
from ortlaunch.launch.plan import LaunchPlan, NodePart
from ortlaunch.run import claim, failure, sweep
from ortlaunch.run.claim import Claim
from ortlaunch.run.goodput import journal_goodput
from ortlaunch.run.journal import Journal, read_events
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.relay import Relay, RelayResult

_POLL_SECONDS = 0.1
_TAIL_LINES = 15
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(part: NodePart, config: Config, arguments: list[str]) -> int:
    """Runs this machine's part of a run to its end; the first of several machines keeps the record.

    Args:
        part: what to run.
        config: the configuration, its tracking places made absolute.
        arguments: the command line after ``ortlaunch``, for the record.

    Returns:
        The exit code: 0 done, 1 the training failed, 2 the request turned out wrong, 130 interrupted (143 and 129
        for SIGTERM and SIGHUP).
    """
    started = time.time()
    if part.rank > 0:
        return _run_further_machine(part, config, started)
    plan = part.plan
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    # `resume` has already asked the scheduler about an earlier job of the run.
    own_claim = claim.take(plan.files, job_is_over=lambda _: True)
    try:
        return _run_claimed(part, config, arguments, started, own_claim)
    finally:
        own_claim.release()


def _run_claimed(part: NodePart, config: Config, arguments: list[str], started: float, own_claim: Claim) -> int:
    """Runs this machine's part of a run that this process has claimed."""
    plan = part.plan
    write_run_folder(plan, config, arguments, part.start)
    Run(plan.run_dir).note_launcher()
    journal = Journal(plan.journal)
    journal_start(journal, plan, config)
    display = Display(part, config.train.steps, resolve_device(config.device).value)
    for line in _lines_for_others(plan, config, arguments):
        display.line(line)
    cfgs = trackers.chosen(config)
    relay = Relay(plan.run_dir, *cfgs)
    outcome = _run_workers(part, config, display, started, relay, own_claim)
    if outcome.failure is not None and outcome.failure.is_request:
        restore_configuration(plan)
    elif outcome.failure is not None:
        journal.failure(outcome.failure.rank, outcome.failure.host, outcome.failure.message)
    account = journal_goodput(journal)
    journal.end(outcome.status)
    sweep_over = sweep.note_end(plan.run_dir, outcome.status)
    sent, is_stopped = _send_the_rest(relay, sweep_over, cfgs)
    code = outcome.exit_code or (exit_codes.INTERRUPTED if is_stopped else exit_codes.DONE)
    with _uninterrupted():
        if outcome.failure is not None:
            print(describe_failure(outcome.failure, plan), file=sys.stderr, flush=True)
        ending = "stopped" if plan.stopped.exists() else outcome.status.lower()
        record = _record(plan, config, sent, outcome, has_trained="train/loss" in display.latest)
        display.summary(ending, time.time() - started, record, account)
    return code


def _send_the_rest(relay: Relay, sweep_over: Path | None, cfgs: list[Any]) -> tuple[RelayResult, bool]:
    """Sends the rest of the journal to the trackers. If the user interrupts this, the command still prints a summary.

    Args:
        relay: the run's relay.
        sweep_over: folder of the sweep that has ended with the run; None if none has.
        cfgs: the trackers' configurations.

    Returns:
        What was sent of the run's journal, and whether the user has interrupted the command.
    """
    try:
        sent = relay.finish(trackers.flush_seconds(cfgs))
        if sweep_over is not None:
            Relay(sweep_over, *cfgs).finish(trackers.flush_seconds(cfgs))
    except KeyboardInterrupt:
        with _uninterrupted():
            return relay.finish(0.0), True
    return sent, False


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Lets a further Ctrl-C not cut off the last lines, which say how the run ended and how to go on."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _run_further_machine(part: NodePart, config: Config, started: float) -> int:
    """Runs the workers of a further machine. The first machine keeps the record and prints the outcome."""
    plan = part.plan
    machines.wait_for_first(plan.run_dir, config if plan.attempt == 0 else None)
    display = Display(part, config.train.steps, resolve_device(config.device).value)
    outcome = _run_workers(part, config, display, started, None, None)
    if outcome.failure is not None:
        print(describe_failure(outcome.failure, plan), file=sys.stderr, flush=True)
    display.line("the workers of this machine have ended; the first machine keeps the record")
    return outcome.exit_code


def _run_workers(
    part: NodePart, config: Config, display: Display, started: float, relay: Relay | None, own_claim: Claim | None
) -> Outcome:
    """Runs this machine's workers to their end. Shows what they journal, and sends it to the trackers."""
    with _StopFlag() as stop:
        # The workers start before any thread of this process, because a fork may copy a lock that a thread holds.
        group = WorkerGroup(part.start, part.torchrun_log, started)
        try:
            display.start()
            if relay is not None:
                relay.start()
            code = _watch(group, stop, part.plan, display, config.launcher, own_claim)
        finally:
            group.kill()
            display.stop()
    return _outcome(part, code, stop.signal)


def _lines_for_others(plan: LaunchPlan, config: Config, arguments: list[str]) -> list[str]:
    """Returns the commands for the other machines, if the user has not seen them yet."""
    launcher = config.launcher
    assert isinstance(launcher, LocalConfig)
    if launcher.nodes == 1 or (launcher.run is not None and not plan.attempt):
        return []
    lines = machines.lines_to_type(launcher, plan.run, Path(config.run_root), arguments)
    return ["type on the other machines:", *(f"  {line}" for line in lines[1:])]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    exit_code: int
    failure: failure.Failure | None = None


def describe_failure(found: failure.Failure, plan: LaunchPlan) -> str:
    """Returns the failure as text for the user: rank, host, message and log file."""
    if found.is_request:
        return f"ortlaunch: {found.message}"
    return (
        f"ortlaunch: rank {found.rank} on {found.host} failed:\n{found.message}\n"
        f"the whole log: {plan.files.rank_log(found.rank)}"
    )


class _StopFlag:
    """Remembers the first signal that asks to stop; the handler does nothing else."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.repeated = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _StopFlag:
        for number in _STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: object) -> None:
        self.repeated = self.signal is not None
        self.signal = self.signal or number


def _watch(
    group: WorkerGroup,
    stop: _StopFlag,
    plan: LaunchPlan,
    display: Display,
    launcher: LauncherConfig,
    own_claim: Claim | None,
) -> int:
    """Watches the workers until torchrun ends; returns torchrun's exit code.

    Raises:
        RequestError: another launcher has taken the run over; nothing more is written.
    """
    offset = plan.journal.stat().st_size
    stopping = _Stopping(group, stop, plan, display, launcher)
    while True:
        # torchrun is polled before its output is read, so that all output from before its end is shown below.
        code = group.poll()
        offset = _show(plan, group, display, offset)
        if own_claim is not None and not own_claim.keep():
            group.kill()
            raise RequestError(f"{plan.run_dir}: another launcher has taken this run over; its workers here are ended")
        if code is not None:
            return code
        stopping.act()
        time.sleep(_POLL_SECONDS)


def _show(plan: LaunchPlan, group: WorkerGroup, display: Display, offset: int) -> int:
    """Shows what the workers have journalled from `offset` on, and rank 0's output; returns the new offset."""
    events, offset = read_events(plan.journal, offset)
    for event in events:
        display.event(event)
    display.look()
    for line in group.lines():
        display.line(line)
    return offset


class _Stopping:
    """Ends the workers: on request after a checkpoint, and at once on a second request or when it takes too long."""

    def __init__(
        self, group: WorkerGroup, stop: _StopFlag, plan: LaunchPlan, display: Display, launcher: LauncherConfig
    ) -> None:
        self._group = group
        self._stop = stop
        self._plan = plan
        self._display = display
        self._launcher = launcher
        self._deadline: float | None = None
        """When the workers are ended, on the monotonic clock; None before a request, infinite once it has passed."""

    def act(self) -> None:
        """Does what is due now. The caller calls it several times a second while the workers run."""
        if self._stop.signal is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._ask()
        # torchrun would start the workers again, although their request is wrong.
        fails_again = self._launcher.max_restarts and failure.is_request(self._plan.run_dir)
        if self._stop.repeated or fails_again:
            self._group.kill()
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = math.inf
            threading.Thread(target=self._group.terminate, daemon=True).start()

    def _ask(self) -> float:
        """Passes on the first request to stop; returns the seconds after which the workers are ended."""
        if not self._display.trains:
            self._display.line("stopping the workers (again to stop them at once)")
            return 0.0
        # torchrun would pass a signal on and then end the workers while they write their checkpoint.
        self._plan.stop_file.touch()
        self._display.line("finishing the step and writing a checkpoint (again to stop at once)")
        return self._launcher.grace_seconds


def _outcome(part: NodePart, code: int, stop_signal: int | None) -> Outcome:
    """Returns how the run ended.

    Args:
        part: this machine's part of the run.
        code: torchrun's exit code.
        stop_signal: the first signal to this process that asked to stop; None if there was none.
    """
    plan = part.plan
    if plan.stopped.exists():
        # A stop by the file alone has the exit code of Ctrl-C. If torchrun has failed, a signal has reached torchrun
        # itself, and the exit code is that of SIGTERM.
        number = stop_signal or (signal.SIGTERM if code else signal.SIGINT)
        return Outcome("KILLED", exit_codes.stopped_by(number))
    if stop_signal is not None:
        # The run may have finished before the request, but this exit code must still end a sweep.
        return Outcome("FINISHED" if code == 0 else "KILLED", exit_codes.stopped_by(stop_signal))
    if code == 0:
        return Outcome("FINISHED", exit_codes.DONE)
    found = failure.first(plan.run_dir, *plan.files.torchrun_logs()) or _torchrun_failure(part, code)
    return Outcome("FAILED", exit_codes.REQUEST if found.is_request else exit_codes.FAILED, found)


def _torchrun_failure(part: NodePart, code: int) -> failure.Failure:
    """Returns the failure of torchrun itself, with the end of its log."""
    tail = "\n".join(part.torchrun_log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:])
    return failure.Failure(0, socket.gethostname(), f"torchrun ended with {code}:\n{tail}", False, 0.0)


def _record(
    plan: LaunchPlan, config: Config, sent: RelayResult, outcome: Outcome, *, has_trained: bool
) -> list[tuple[str, str]]:
    lines = [("run folder", str(plan.run_dir))]
    if outcome.status != "FINISHED" and plan.files.newest_checkpoint():
        lines.append(("go on", f"ortlaunch resume {shlex.quote(str(plan.run_dir))}"))
    elif outcome.status == "KILLED" and has_trained:
        lines.append(("go on", "no checkpoint was written; train.checkpoint_every=N writes them on the way"))
    for one in sent.sinks:
        unsent = [(one.name, f"{one.unsent_events} events not sent: {one.message}")]
        lines += one.lines(config.experiment) if one.sent else unsent
    if not sent.sent:
        lines.append(("send them", f"ortlaunch sync {shlex.quote(str(plan.run_dir))}"))
    return lines
