"""Runs a plan on this machine: writes the run folder, starts torchrun, watches it, and prints how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import size_of
from ortlaunch.config.schema import LocalConfig
from ortlaunch.launch.auto import keep_rate
from ortlaunch.launch.folder import journal_start, restore_configuration, say_notes, write_run_folder, written
from ortlaunch.launch.local import machines
from ortlaunch.launch.local.display import Display
from ortlaunch.launch.local.stop_flag import StopFlag
from ortlaunch.launch.local.workers import WorkerGroup
from ortlaunch.launch.outages import Outages, told_of_wait
from ortlaunch.launch.plan import LaunchPlan, NodePart
from ortlaunch.launch.presence import Presence, describe
from ortlaunch.launch.samples import Samples
from ortlaunch.launch.stalls import Stalls
from ortlaunch.run import claim, failure
from ortlaunch.run.checkpoints import step_of
from ortlaunch.run.claim import Claim
from ortlaunch.run.ending import Ending, end_run
from ortlaunch.run.journal import Journal, read_events
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.run import Stopped
from ortlaunch.run.state import STOPPED_TAG
from ortlaunch.tracking import trackers
from ortlaunch.tracking.relay import Relay, RelayResult

_POLL_SECONDS = 0.5
"""Each look takes from a core that the workers need."""
_GONE_SECONDS = 5.0
"""How long a tracker may take to hear of the end of a run whose folder is gone."""
_TAIL_LINES = 15
_ROOM_BYTES = 4096
"""A disk with less room takes no file."""


def run_part(part: NodePart) -> int:
    """Runs this machine's part of a run to its end; the first of several machines keeps the record.

    Args:
        part: what to run.

    Returns:
        The exit code: 0 done, 1 the training failed, 2 the request turned out wrong, 130 interrupted (143 and 129
        for SIGTERM and SIGHUP).
    """
    started = time.time()
    if part.rank > 0:
        return _run_further_machine(part, started)
    plan = part.plan
    with StopFlag() as stop:
        # Until the workers start, only a second request stops at once: git or a slow disk may keep the start waiting.
        stop.is_urgent = True
        make_run_folder(plan.run_dir)
        with written(plan):
            # `resume` has claimed the run already, since it had to ask the scheduler about an earlier job of the run.
            own_claim = claim.take(plan.files)
        journal: Journal | None = None
        try:
            with written(plan):
                write_run_folder(plan, part.start)
                # It is open when others learn of this process: by that they know the run's launcher.
                journal = plan.files.journal(is_patient=True)
                plan.files.note_launcher()
            journal_start(journal, plan)
            say_notes(plan)
            return _Attempt(part, started, journal, own_claim, stop).run()
        finally:
            own_claim.release(None if journal is None else journal.unwritten_end)


@dataclasses.dataclass
class _Attempt:
    """One attempt of a run that this process has claimed, on the machine that keeps the record."""

    part: NodePart
    started: float
    journal: Journal
    own_claim: Claim
    stop: StopFlag

    def run(self) -> int:
        """Runs the workers to their end, journals and sends how they ended, and prints it; returns the exit code."""
        part, plan, begun = self.part, self.part.plan, time.monotonic()
        display = Display(part)
        for line in _lines_for_others(plan):
            display.line(line)
        if self.journal.problem:
            text = f"{plan.journal} cannot be written ({self.journal.problem}): its events are kept until there is room"
            print(f"ortlaunch: {text}", file=sys.stderr, flush=True)
        cfgs = trackers.chosen(plan.config)
        relay = Relay(plan.run_dir, *cfgs)
        self.stop.is_urgent = False
        if self.own_claim.is_lost:
            raise RequestError(_taken_over(plan))
        outcome = _run_workers(part, display, self.started, relay, self.own_claim, self.stop)
        # Without the wait for a tracker that is away, which is no part of the training.
        seconds = time.monotonic() - begun
        before = self.stop.count
        ending = Ending(None, None) if outcome.is_gone else self._journal_end(outcome)
        with self.own_claim.kept():
            sent = self._send_the_rest(relay, outcome, cfgs, ending.sweep, lambda: self.stop.count > before)
        code = outcome.exit_code
        if self.stop.count > before and self.stop.latest is not None:
            code = code or exit_codes.stopped_by(self.stop.latest)
        if outcome.failure is not None:
            print(describe_failure(outcome.failure, plan), file=sys.stderr, flush=True)
        how = "stopped" if plan.files.stopped_file.exists() else outcome.status.lower()
        record = _record(plan, sent, outcome, has_trained="train/loss" in display.latest)
        display.summary(how, seconds, record, ending.account)
        return code

    def _journal_end(self, outcome: Outcome) -> Ending:
        """Journals how the workers ended. If the journal cannot be written, the claim will keep the end."""
        run, journal, told = self.part.plan.files, self.journal, bool(self.journal.problem)
        if outcome.failure is not None and outcome.failure.is_request:
            # A full disk must not keep the run from its end.
            with contextlib.suppress(OSError):
                restore_configuration(run, self.part.plan.attempt)
        elif outcome.failure is not None:
            journal.failure(outcome.failure.rank, outcome.failure.host, outcome.failure.message)
        stopped = run.stopped() if outcome.status == "KILLED" else None
        if stopped is not None:
            # Workers have journalled it with their checkpoint, but not a stop before the first step.
            journal.tags({STOPPED_TAG: str(stopped.step)})
        ending = end_run(run, journal, outcome.status)
        if outcome.status == "FINISHED":
            with contextlib.suppress(OSError):  # It reads the journal.
                keep_rate(self.part.plan)
        if journal.problem and not told:
            text = f"{journal.path} cannot be written ({journal.problem}): when there is room, ortlaunch sync journals"
            print(f"ortlaunch: {text} that the run has {outcome.status.lower()}", file=sys.stderr, flush=True)
        return ending

    def _send_the_rest(
        self, relay: Relay, outcome: Outcome, cfgs: list[Any], sweep_over: Path | None, is_cut_short: Callable[[], bool]
    ) -> RelayResult:
        """Sends the rest of the journal to the trackers.

        Args:
            relay: the run's relay.
            outcome: how the workers ended.
            cfgs: the trackers' configurations.
            sweep_over: folder of the sweep that has ended with the run; None if none has.
            is_cut_short: whether there was a request to stop since the workers ended.
        """
        seconds = trackers.flush_seconds(cfgs)
        if outcome.is_gone:
            return relay.give_up(outcome.status, min(seconds, _GONE_SECONDS), is_cut_short)
        for line in told_of_wait(relay, seconds):
            print(line, flush=True)
        sent = relay.finish(seconds, is_cut_short)
        if sweep_over is not None:
            Relay(sweep_over, *cfgs).finish(seconds, is_cut_short)
        return sent


def _run_further_machine(part: NodePart, started: float) -> int:
    """Runs the workers of a further machine. The first machine keeps the record and prints the outcome."""
    plan = part.plan
    machines.wait_for_first(plan)
    display = Display(part)
    with StopFlag() as stop:
        outcome = _run_workers(part, display, started, None, None, stop)
    if outcome.failure is not None:
        print(describe_failure(outcome.failure, plan), file=sys.stderr, flush=True)
    display.line("the workers of this machine have ended; the first machine keeps the record")
    return outcome.exit_code


def _run_workers(
    part: NodePart,
    display: Display,
    started: float,
    relay: Relay | None,
    own_claim: Claim | None,
    stop: StopFlag,
) -> Outcome:
    """Runs this machine's workers to their end. Shows what they journal, and sends it to the trackers."""
    if stop.signal is not None:
        display.line("stopped before the workers started")
        _note_stop_before_step(part)
        return Outcome("KILLED", exit_codes.stopped_by(stop.signal))
    # The workers start before any thread of this process, because a fork may copy a lock that a thread holds.
    own = {} if own_claim is None else own_claim.environment()
    secrets = trackers.worker_environment(part.plan.config)
    start = dataclasses.replace(part.start, environment=part.start.environment | own | secrets)
    # Fast workers journal their first events before the threads below have begun.
    offset = size_of(part.plan.journal)
    group = WorkerGroup(start, part.torchrun_log, started)
    try:
        display.start()
        if relay is not None:
            relay.start()
        outages = None if relay is None else Outages(part.plan.files, relay)
        code = _watch(group, stop, part.plan, display, own_claim, outages, offset)
        if outages is not None:
            outages.end()
        # Workers that are ended before their first step, or by this launcher, fail because of that.
        by_themselves = display.trains and not group.was_ended
    finally:
        group.kill()
        display.stop()
        if part.rank == 0:
            part.plan.files.clear_scratch()
    if stop.signal is not None and code and not display.trains:
        _note_stop_before_step(part)
    outcome = _outcome(part, code, stop.signal, by_themselves=by_themselves)
    if code and outcome.status == "FINISHED":
        display.line(f"warning: a worker failed after the last step, when all was written: {part.torchrun_log}")
    return outcome


def _note_stop_before_step(part: NodePart) -> None:
    """Records a stop that came before the first step of this attempt, so that the run reads stopped and not killed.

    Workers that have made a step record the stop with their checkpoint. These had nothing to save.
    """
    plan = part.plan
    if part.rank > 0 or plan.files.stopped_file.exists() or plan.files.is_gone:
        return
    name = plan.files.newest_checkpoint()
    place = plan.files.checkpoints / name
    stopped = Stopped(step_of(place) or 0, str(place) if name else "", plan.files.stop_word() or "signal")
    with contextlib.suppress(OSError):  # The journal says by itself that the run has ended.
        plan.files.note_stopped(stopped)


def _lines_for_others(plan: LaunchPlan) -> list[str]:
    """Returns the commands for the other machines, if the user has not seen them yet."""
    launcher = plan.config.launcher
    assert isinstance(launcher, LocalConfig)
    if launcher.nodes == 1 or (launcher.run is not None and not plan.attempt):
        return []
    return ["type on the other machines:", *(f"  {line}" for line in machines.lines_to_type(plan)[1:])]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    exit_code: int
    failure: failure.Failure | None = None
    is_gone: bool = False
    """Whether the run folder is there no more."""


def describe_failure(found: failure.Failure, plan: LaunchPlan) -> str:
    """Returns the failure as text for the user: rank, host, message and log file."""
    if found.is_request or plan.files.is_gone:
        return f"ortlaunch: {found.message}"
    return (
        f"ortlaunch: rank {found.rank} on {found.host} failed:\n{found.message}\n"
        f"the whole log: {plan.files.rank_log(found.rank)}"
    )


def _watch(
    group: WorkerGroup,
    stop: StopFlag,
    plan: LaunchPlan,
    display: Display,
    own_claim: Claim | None,
    outages: Outages | None,
    offset: int,
) -> int:
    """Watches the workers until torchrun ends or the run folder is gone; returns torchrun's exit code.

    Events of the journal are shown from the byte `offset` on.

    Raises:
        RequestError: another launcher has taken the run over; nothing more is written.
    """
    gone = Presence(plan.files)
    stopping = _Stopping(group, stop, plan, display)
    stalls = Stalls(plan.files) if own_claim is not None else None
    samples = Samples(plan.files) if own_claim is not None else None
    while True:
        # torchrun is polled before its output is read, so that all output from before its end is shown below.
        code = group.poll()
        offset = _show(plan, group, display, offset)
        if own_claim is not None and not own_claim.keep():
            group.kill()
            raise RequestError(f"{_taken_over(plan)}; its workers here are ended")
        if code is not None:
            if samples is not None:
                samples.journal()
                _show(plan, group, display, offset)
            return code
        if gone.is_over():
            return exit_codes.FAILED
        for watch in (stalls, samples, outages):
            for line in watch.look() if watch is not None else []:
                display.line(line)
        stopping.act()
        group.wait(_POLL_SECONDS)


def _taken_over(plan: LaunchPlan) -> str:
    return f"{plan.run_dir}: another launcher has taken this run over"


def _show(plan: LaunchPlan, group: WorkerGroup, display: Display, offset: int) -> int:
    """Shows what the workers have journalled from `offset` on, and rank 0's output; returns the new offset."""
    # A network file system that errs once must not end the workers: the next call shows what this one has not.
    with contextlib.suppress(OSError):
        events, offset = read_events(plan.journal, offset)
        for event in events:
            display.event(event)
    display.look()
    for line in group.lines():
        display.line(line)
    return offset


class _Stopping:
    """Ends the workers: on request after a checkpoint, and at once on a second request or when it takes too long."""

    def __init__(self, group: WorkerGroup, stop: StopFlag, plan: LaunchPlan, display: Display) -> None:
        self._group = group
        self._stop = stop
        self._plan = plan
        self._display = display
        self._launcher = plan.config.launcher
        self._work = plan.work
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
        if not (self._display.trains or self._work.stops_before_first_step):
            self._display.line("stopping the workers (again to stop them at once)")
            return 0.0
        # torchrun would pass a signal on and then end the workers while they write their checkpoint.
        try:
            self._plan.files.stop_file.touch()
        except OSError as error:
            self._display.line(f"stopping the workers without a checkpoint ({error.strerror})")
            return 0.0
        self._display.line(f"{self._work.stopping} (again to stop at once)")
        return self._launcher.grace_seconds


def _outcome(part: NodePart, code: int, stop_signal: int | None, *, by_themselves: bool) -> Outcome:
    """Returns how the run ended.

    Args:
        part: this machine's part of the run.
        code: torchrun's exit code.
        stop_signal: the first signal to this process that asked to stop; None if there was none.
        by_themselves: the workers had made a step, and were not ended by this process.
    """
    plan = part.plan
    if plan.files.is_gone:
        text = describe(plan.files)
        return Outcome("FAILED", exit_codes.FAILED, failure.Failure(0, socket.gethostname(), text, False, 0.0), True)
    if plan.files.stopped_file.exists():
        # A stop by the file alone has the exit code of Ctrl-C. If torchrun has failed, a signal has reached torchrun
        # itself, and the exit code is that of SIGTERM.
        number = stop_signal or (signal.SIGTERM if code else signal.SIGINT)
        return Outcome("KILLED", exit_codes.stopped_by(number))
    # Of several machines, another one may have the first worker, and its file system may show the file later.
    is_done = plan.files.is_done() or (code == 0 and plan.nodes > 1)
    found = None if is_done else failure.first(plan.run_dir, *plan.files.torchrun_logs())
    if stop_signal is not None:
        # The run may have finished before the request, or failed to write its checkpoint. This exit code must still end
        # a sweep.
        found = found if by_themselves else None
        status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED" if found is not None else "KILLED"
        return Outcome("FINISHED" if is_done else status, exit_codes.stopped_by(stop_signal), found)
    if is_done:
        return Outcome("FINISHED", exit_codes.DONE)
    found = found or _torchrun_failure(part, code)
    return Outcome("FAILED", exit_codes.REQUEST if found.is_request else exit_codes.FAILED, found)


def _torchrun_failure(part: NodePart, code: int) -> failure.Failure:
    """Returns the failure of torchrun itself, with the end of its log, or of workers that ended too early."""
    if code == 0:
        text = "the workers ended without an error before the last step: does the model's code end its process?"
        return failure.Failure(0, socket.gethostname(), text, False, 0.0)
    log = part.torchrun_log
    said = log.read_text(errors="replace") if log.is_file() else ""
    tail = "\n".join(said.strip().splitlines()[-_TAIL_LINES:])
    text = f"torchrun ended with {code}:\n{tail}" if tail else f"torchrun ended with {code} and said nothing"
    if _is_full(part.plan.run_dir):
        text = f"{text}\nthe disk of {part.plan.run_dir} is full: make room, then ortlaunch resume"
    return failure.Failure(0, socket.gethostname(), text, False, 0.0)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _ROOM_BYTES
    except OSError:
        return False


def _record(plan: LaunchPlan, sent: RelayResult, outcome: Outcome, *, has_trained: bool) -> list[tuple[str, str]]:
    if outcome.is_gone:
        return []
    lines = [("run folder", str(plan.run_dir))]
    if outcome.status != "FINISHED" and plan.files.newest_checkpoint():
        lines.append(("go on", f"ortlaunch resume {shlex.quote(str(plan.run_dir))}"))
    elif outcome.status != "FINISHED" and plan.work.counts_launches:
        lines.append(("run again", f"ortlaunch resume {shlex.quote(str(plan.run_dir))}"))
    elif outcome.status == "KILLED" and has_trained:
        lines.append(("go on", "no checkpoint was written; train.checkpoint_every=N writes them on the way"))
    for one in sent.sinks:
        lines += one.lines(plan.config.experiment) if one.sent else [(one.name, one.message)]
    if not sent.sent:
        lines.append(("send them", sent.sinks[0].remedy))
    return lines
