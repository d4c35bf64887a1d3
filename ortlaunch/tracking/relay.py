"""The relay sends a run's journal to its trackers, during the run and after it. A failing server never stops a run.

`Relay` sends in threads of the launcher, and `sync` sends once in the foreground. Both continue where the last one
stopped. Each tracker has its own thread, offset and failures, so no tracker waits for another.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.run.events import Status
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import runs_of
from ortlaunch.tracking import trackers
from ortlaunch.tracking.forward import Forwarder
from ortlaunch.tracking.state import Destination, destination

_POLL_SECONDS = 0.5
_GATHER_SECONDS = 5.0
"""Events of this period are sent in one request. A request costs client and server as much time as 70 points."""
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0)
_HURRIED_SECONDS = 1.0
_PARTING_SECONDS = 0.3
_ASK_SECONDS = 0.1
_NICENESS = 10


@dataclass(frozen=True)
class SinkResult:
    """How much of a run's journal one tracker has received."""

    to: Destination
    unsent_events: int
    mark: str | None
    """The tracker's mark of the run, such as its id of the run."""
    message: str
    """One line for the user; empty if there is nothing to say. It does not have `remedy`."""
    sent_events: int = 0
    """The number of events that this relay sent."""
    is_unsure: bool = False
    """Whether the tracker has taken all events earlier, but could not be asked now whether it still has them."""

    @property
    def name(self) -> str:
        """The tracker's name."""
        return self.to.tracker.name

    @property
    def where(self) -> str:
        """A short text that says where the run is recorded."""
        return self.to.where(self.mark)

    def lines(self, experiment: str) -> list[tuple[str, str]]:
        """The lines to print at the end of a run that was sent completely, as labels and texts."""
        return self.to.lines(experiment, self.mark)

    @property
    def sent(self) -> bool:
        """Whether the tracker has all events."""
        return self.unsent_events == 0 and not self.is_unsure

    @property
    def remedy(self) -> str:
        """The command that sends what is left."""
        return shlex.join(["ortlaunch", "sync", str(self.to.run_dir)])


@dataclass(frozen=True)
class RelayResult:
    """How much of a run's journal its trackers have received."""

    sinks: tuple[SinkResult, ...] = ()

    @property
    def sent(self) -> bool:
        """Whether every tracker has all events."""
        return all(one.sent for one in self.sinks)

    @property
    def unsent_events(self) -> int:
        """The number of unsent events of the tracker that lacks the most."""
        return max((one.unsent_events for one in self.sinks), default=0)

    @property
    def sent_events(self) -> int:
        """The number of events that this relay sent to all trackers together."""
        return sum(one.sent_events for one in self.sinks)

    @property
    def message(self) -> str:
        """One line for the user; empty if there is nothing to say."""
        said = [one.message for one in self.sinks if one.message]
        remedies = [f"send them with: {one.remedy}" for one in self.sinks if one.unsent_events]
        return "; ".join(said + list(dict.fromkeys(remedies)))

    @property
    def mlflow_run_id(self) -> str | None:
        """MLflow's id of the run."""
        return next((one.mark for one in self.sinks if one.name == trackers.MAIN), None)


class Relay:
    """Sends `run_dir/journal.jsonl` while the run writes it. Errors are logged and never raised to the caller."""

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

    def outages(self) -> dict[str, tuple[float, str]]:
        """The trackers that take no events now: for how many seconds they have taken none, and why."""
        found = {}
        for sender in self._senders:
            if (outage := sender.forwarder.outage()) is not None:
                to = sender.forwarder.to
                found[f"{to.tracker.title} at {to.place}"] = outage
        return found

    def finish(self, deadline_seconds: float, is_cut_short: Callable[[], bool] = lambda: False) -> RelayResult:
        """Sends what is left and stops.

        Args:
            deadline_seconds: the longest time for all trackers together.
            is_cut_short: asked several times a second; True ends the wait, and what is unsent stays in the journal.
        """
        deadline = time.monotonic() + max(0.0, deadline_seconds - _PARTING_SECONDS)
        for sender in self._senders:
            sender.hurry()
        for sender in self._senders:
            sender.wait(deadline, is_cut_short)
        for sender in self._senders:
            sender.abort()
        deadline = time.monotonic() + _PARTING_SECONDS
        for sender in self._senders:
            sender.wait(deadline)
        return RelayResult(tuple(_result(sender.forwarder) for sender in self._senders))

    def give_up(
        self, status: Status, deadline_seconds: float, is_cut_short: Callable[[], bool] = lambda: False
    ) -> RelayResult:
        """Ends the run in the trackers that know it, although its journal is gone, and stops.

        Args:
            status: how the run ended.
            deadline_seconds: as for `finish`.
            is_cut_short: as for `finish`.
        """
        for sender in self._senders:
            sender.forwarder.journal_is_gone(status)
        return self.finish(deadline_seconds, is_cut_short)


class _Sender:
    """The thread that sends to one tracker."""

    def __init__(self, to: Destination) -> None:
        self.forwarder = Forwarder(to)
        self._thread = threading.Thread(target=self._work, name=f"ortlaunch-relay-{to.tracker.name}", daemon=True)
        self._hurry = threading.Event()
        self._abort = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def hurry(self) -> None:
        """Tells the thread that the journal is complete. It sends what is left without pauses."""
        if not self._thread.ident:
            self._thread.start()
        self._hurry.set()

    def abort(self) -> None:
        """Tells the thread to stop after its present step."""
        self._abort.set()

    def wait(self, deadline: float, is_cut_short: Callable[[], bool] = lambda: False) -> None:
        """Waits until all is sent, until the deadline on the monotonic clock, or until the wait is cut short."""
        while self._thread.is_alive() and not is_cut_short() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, _ASK_SECONDS))

    def _work(self) -> None:
        with suppress(OSError):
            # On Linux, the niceness of a thread id applies to this thread alone. If a worker and this thread want the
            # same core, the worker gets it. The niceness is never lowered.
            thread = threading.get_native_id()
            nice = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        failures = 0
        while not self._abort.is_set():
            last = self._hurry.is_set()  # This is read before the step, so that all events before finish() are sent.
            outcome = self.forwarder.try_step(final=last)
            if outcome is None:
                if last and self.forwarder.is_refused:
                    break
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


def sync(run_dir: Path, *cfgs: Any, asks: bool = False) -> RelayResult:
    """Sends what is left of a run's journal in the foreground. It gives up after some failed tries in a row.

    Args:
        run_dir: the run folder, or a sweep's.
        *cfgs: the trackers' configurations.
        asks: the trackers are asked whether they still have what was sent before; all is sent again to those that
            have lost it.
    """
    forwarders = [Forwarder(to, asks) for to in _destinations(run_dir, cfgs)]
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
        while failures < len(_BACKOFF_SECONDS) and not forwarder.is_refused:
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
    """The destinations, one for each tracker. A sweep's folder is sent only to trackers that list runs."""
    found = [destination(run_dir, cfg) for cfg in cfgs]
    return found if runs_of(run_dir) is None else [to for to in found if to.tracker.lists_runs]


def _result(forwarder: Forwarder) -> SinkResult:
    to = forwarder.to
    unsent, parts = to.unsent(), []
    if unsent:
        # `logs/relay.log` has all that was said: MLflow wraps a refused connection in three hundred characters.
        why = f" ({forwarder.cause})" if forwarder.cause else ""
        parts.append(f"{unsent} journal events have not reached {to.tracker.title} at {to.place}{why}")
    elif forwarder.unasked:
        parts.append(f"{to.tracker.title} at {to.place} cannot be asked whether it still has them: {forwarder.unasked}")
    if forwarder.refused:
        parts.append(f"{forwarder.refused} values were left out: see {Run(to.run_dir).relay_log}")
    return SinkResult(to, unsent, to.load().mark, "; ".join(parts), forwarder.sent_events, bool(forwarder.unasked))
