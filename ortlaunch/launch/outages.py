"""Notices trackers that take no events while a run goes on, such as a server that is away, and says so while it lasts.

Training does not wait for a tracker, and the journal keeps every event. So this is for the user, who can start the
server again before the run ends.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ortlaunch.base.text import moment
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.state import OUTAGE_TAG
from ortlaunch.tracking.relay import Relay

_LOOK_SECONDS = 2.0
_AWAY_SECONDS = 5.0
"""A tracker is reported after this time without success, so that a server may start again unnoticed."""


class Outages:
    """Looks at what a relay could not send. The launcher, or the job's first process, calls `look` again and again."""

    def __init__(self, run: Run, relay: Relay) -> None:
        """
        Args:
            run: the run, whose folder exists.
            relay: sends the run's journal.
        """
        self._run = run
        self._relay = relay
        self._looked = time.monotonic()
        self._away: dict[str, float] = {}
        """When each tracker that was reported took its last event, in seconds since the epoch."""
        self._over: dict[str, str] = {}
        """What there is to journal of outages that are over, the latest of each tracker."""

    def look(self) -> list[str]:
        """Looks whether a tracker takes no events or takes them again, and journals that.

        Returns:
            Lines for the user; empty if nothing has changed.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        lines = []
        outages = self._relay.outages()
        for name in [name for name in self._away if name not in outages]:
            self._over[name] = f"{name} took no events from {moment(self._away.pop(name))} to {moment(time.time())}"
            lines.append(f"ortlaunch: {name} takes events again, and gets those that it has missed")
        for name, (seconds, why) in outages.items():
            if name not in self._away and seconds >= _AWAY_SECONDS:
                self._away[name] = time.time() - seconds
                text = f"{name} takes no events since {moment(self._away[name])}: {why}"
                lines.append(f"ortlaunch: {text}. Training goes on, and the journal keeps them until it takes them")
        if lines:
            self._journal()
        return lines

    def end(self) -> None:
        """Journals of trackers that are still away that they were so to the end. It comes before the run's end."""
        for name, since in self._away.items():
            self._over[name] = f"{name} took no events from {moment(since)} to the end of the run"
        if self._away:
            self._away.clear()
            self._journal()

    def _journal(self) -> None:
        away = [f"{name} takes no events since {moment(since)}" for name, since in self._away.items()]
        past = [text for name, text in self._over.items() if name not in self._away]
        with suppress(OSError), Journal(self._run.journal_file) as journal:
            journal.tags({OUTAGE_TAG: "; ".join(away + past)})


def told_of_wait(relay: Relay, seconds: float) -> list[str]:
    """Lines that say that the end of a run waits for a tracker that is away. Without them the command seems to hang.

    Args:
        relay: has sent the run's journal until now.
        seconds: the longest wait.
    """
    return [
        f"ortlaunch: waiting up to {seconds:g} s (tracking.flush_seconds) for {name}: {why}. Ctrl-C ends the wait; the "
        "journal keeps what is not sent"
        for name, (away, why) in relay.outages().items()
        if away >= _AWAY_SECONDS and seconds > 0
    ]
