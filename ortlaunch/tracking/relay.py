"""The relay: sends a run's journal to its trackers, beside the run and after it, whatever becomes of a server.

`Relay` does so in threads of the launcher, `sync` once in the foreground. Both go on where the last one stopped. Each
tracker has a thread, an offset and failures of its own, so that none waits for another.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.run.run import Run
from ortlaunch.run.sweep import runs_of
from ortlaunch.tracking import trackers
from ortlaunch.tracking.forward import Forwarder
from ortlaunch.tracking.state import Destination, destination

_POLL_SECONDS = 0.5
_GATHER_SECONDS = 5.0
"""What is journalled in this time goes in one request: one alone costs client and server the time of 70 points."""
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0)
_HURRIED_SECONDS = 1.0
_PARTING_SECONDS = 0.3
_NICENESS = 10


@dataclass(frozen=True)
class SinkResult:
    """How far a run's journal got to one tracker."""

    to: Destination
    unsent_events: int
    mark: str | None
    """What the tracker calls the run."""
    message: str
    """One line for the user; empty if there is nothing to say."""
    sent_events: int = 0
    """Sent by this relay."""

    @property
    def name(self) -> str:
        """The tracker's."""
        return self.to.tracker.name

    @property
    def where(self) -> str:
        """Where the run is, in a few words."""
        return self.to.where(self.mark)

    def lines(self, experiment: str) -> list[tuple[str, str]]:
        """What to say at the end of a run of which all was sent: labels and texts."""
        return self.to.lines(experiment, self.mark)

    @property
    def sent(self) -> bool:
        """The tracker has all of it."""
        return self.unsent_events == 0


@dataclass(frozen=True)
class RelayResult:
    """How far a run's journal got."""

    sinks: tuple[SinkResult, ...] = ()

    @property
    def sent(self) -> bool:
        """Every tracker has all of it."""
        return all(one.sent for one in self.sinks)

    @property
    def unsent_events(self) -> int:
        """Of the tracker that lacks most."""
        return max((one.unsent_events for one in self.sinks), default=0)

    @property
    def sent_events(self) -> int:
        """Sent by this relay to all trackers together."""
        return sum(one.sent_events for one in self.sinks)

    @property
    def message(self) -> str:
        """One line for the user; empty if there is nothing to say."""
        return "; ".join(one.message for one in self.sinks if one.message)

    @property
    def mlflow_run_id(self) -> str | None:
        """MLflow's id of the run."""
        return next((one.mark for one in self.sinks if one.name == trackers.MAIN), None)


class Relay:
    """Sends `run_dir/journal.jsonl` while the run writes it. Nothing it meets is raised into its owner."""

    def __init__(self, run_dir: Path, *cfgs: Any) -> None:
        """
        Args:
            run_dir: the run folder, or a sweep's.
            *cfgs: the trackers' configurations.
        """
        self._senders = [_Sender(to) for to in _destinations(run_dir, cfgs)]

    def start(self) -> None:
        """Begins to send in the background."""
        for sender in self._senders:
            sender.start()

    def finish(self, deadline_seconds: float) -> RelayResult:
        """Sends what is left and stops, after `deadline_seconds` at the latest for all together."""
        deadline = time.monotonic() + max(0.0, deadline_seconds - _PARTING_SECONDS)
        for sender in self._senders:
            sender.hurry()
        for sender in self._senders:
            sender.wait(deadline)
        for sender in self._senders:
            sender.abort()
        deadline = time.monotonic() + _PARTING_SECONDS
        for sender in self._senders:
            sender.wait(deadline)
        return RelayResult(tuple(_result(sender.forwarder) for sender in self._senders))


class _Sender:
    """The thread that sends to one tracker."""

    def __init__(self, to: Destination) -> None:
        self.forwarder = Forwarder(to)
        self._thread = threading.Thread(target=self._work, name=f"ortlaunch-relay-{to.tracker.name}", daemon=True)
        self._hurry = threading.Event()
        self._abort = threading.Event()

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def hurry(self) -> None:
        """The journal is complete: sends what is left of it without pausing for more."""
        if not self._thread.ident:
            self._thread.start()
        self._hurry.set()

    def abort(self) -> None:
        """Stops after the step that it is at."""
        self._abort.set()

    def wait(self, deadline: float) -> None:
        """Waits until all is sent, or until the deadline on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        with suppress(OSError):
            # On Linux this thread's alone: where both want a core, the workers have it. Never less nice than it was.
            thread = threading.get_native_id()
            nice = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        failures = 0
        while not self._abort.is_set():
            last = self._hurry.is_set()  # Asked before the step: what is journalled before finish() is still sent.
            outcome = self.forwarder.try_step(final=last)
            if outcome is None:
                self._pause(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])
                failures += 1
                continue
            failures = 0
            if not outcome and last:
                break
            if not self.forwarder.behind:
                self._hurry.wait(_GATHER_SECONDS if outcome else _POLL_SECONDS)
        self.forwarder.close()

    def _pause(self, seconds: float) -> None:
        if self._hurry.is_set():
            self._abort.wait(min(seconds, _HURRIED_SECONDS))
        else:
            self._hurry.wait(seconds)


def sync(run_dir: Path, *cfgs: Any) -> RelayResult:
    """Sends what is left of a run's journal, in the foreground; gives up after some tries without success.

    Args:
        run_dir: the run folder, or a sweep's.
        *cfgs: the trackers' configurations.
    """
    forwarders = [Forwarder(to) for to in _destinations(run_dir, cfgs)]
    threads = [threading.Thread(target=_send_rest, args=(other,), daemon=True) for other in forwarders[1:]]
    for thread in threads:
        thread.start()
    for first in forwarders[:1]:
        _send_rest(first)
    for thread in threads:
        thread.join()
    return RelayResult(tuple(_result(forwarder) for forwarder in forwarders))


def _send_rest(forwarder: Forwarder) -> None:
    failures = 0
    try:
        while failures < len(_BACKOFF_SECONDS):
            outcome = forwarder.try_step(final=True)
            if outcome is None:
                time.sleep(_BACKOFF_SECONDS[failures] if failures + 1 < len(_BACKOFF_SECONDS) else 0)
                failures += 1
            elif outcome:
                failures = 0
            else:
                break
    finally:
        forwarder.close()


def _destinations(run_dir: Path, cfgs: tuple[Any, ...]) -> list[Destination]:
    """One for each tracker; a sweep's own folder goes only to those that are an overview of runs."""
    found = [destination(run_dir, cfg) for cfg in cfgs]
    return found if runs_of(run_dir) is None else [to for to in found if to.tracker.lists_runs]


def _result(forwarder: Forwarder) -> SinkResult:
    to = forwarder.to
    unsent, parts = to.unsent(), []
    if unsent:
        why = f" ({forwarder.last_error})" if forwarder.last_error else ""
        parts.append(f"{unsent} journal events have not reached {to.tracker.title} at {to.place}{why}")
        parts.append(f"send them with: ortlaunch sync {to.run_dir}")
    if forwarder.refused:
        parts.append(f"{forwarder.refused} values were left out: see {Run(to.run_dir).relay_log}")
    return SinkResult(to, unsent, to.load().mark, "; ".join(parts), forwarder.sent_events)
