"""Goodput: the share of a run's wall time that went into optimizer steps that counted, over all its attempts.

It is computed from the journal alone. docs/metrics.md has the definitions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ortlaunch.run import events
from ortlaunch.run.events import Event
from ortlaunch.run.journal import Journal, iterate
from ortlaunch.run.state import FIRST_STEP, STOPPED_TAG, RunState


@dataclass(frozen=True)
class Goodput:
    """A run's wall time in seconds, divided into parts that add up to `wall`."""

    wall: float
    """From the first start to the end, without the time in a queue and the time after a stop or a finish."""
    productive: float
    """The time of optimizer steps that were not repeated."""
    startup: float
    """The time up to the first step (processes, imports, building, export, compilation), and the time that warm-up
    steps take in excess of the later steps."""
    evaluation: float
    checkpoint: float
    """The time in which training waited for a checkpoint."""
    lost: float
    """The time of steps that were repeated because no checkpoint held them."""
    down: float
    """The time between an attempt's last journalled work and the start of the next attempt: work that was not
    journalled, a failure that nobody noticed yet, the restart."""
    other: float
    """The rest: logging, starts that led to no step, writing the weights at the end."""

    @property
    def percent(self) -> float:
        """The productive share."""
        return 100.0 * self.productive / self.wall if self.wall > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The account as metrics, by their names in MLflow."""
        parts = ("productive", "startup", "evaluation", "checkpoint", "lost", "down", "other", "wall")
        seconds = {f"goodput/{part}_seconds": getattr(self, part) for part in parts}
        return {"summary/goodput_percent": self.percent} | seconds


@dataclass
class _Window:
    """The steps `first` to `last`, both included, which took `seconds` each."""

    first: int
    last: int
    seconds: float

    @property
    def total(self) -> float:
        return (self.last - self.first + 1) * self.seconds


class Ledger:
    """Takes a journal's events in order and adds up the parts of a `Goodput`."""

    def __init__(self) -> None:
        self.last_step = 0
        """The last step that was journalled."""
        self._now: float | None = None
        self._state = RunState()
        self._uncounted = 0.0
        self._first: float | None = None
        self._windows: list[_Window] = []  # Steps of earlier attempts that still count.
        self._attempt: list[_Window] = []
        self._position = 0
        self._worked: tuple[float, float] | None = None  # Time of the last journalled metric, and `_uncounted` then.
        self._starting: float | None = None
        # These metrics are journalled when a run ends. They do not show that it worked at that time.
        self._account = Goodput(*[0.0] * 8).metrics().keys()
        self._startup = self._evaluation = self._checkpoint = self._lost = self._down = 0.0

    def take(self, event: Event) -> None:
        """Takes the next event."""
        at = event.t / 1000.0
        if self._first is None:
            self._first = self._now = at
        self._pass_time(at)
        self._state.take(event)
        if isinstance(event, events.Tagged):
            if (step := event.values.get(STOPPED_TAG)) is not None and step.isdigit():
                self._reach(int(step))
        elif isinstance(event, events.Rewound):
            self._rewind(event.step)
        elif isinstance(event, events.Measured):
            self._take_metrics(event.step, event.values)

    def result(self, now: float | None = None) -> Goodput:
        """The account as of a moment.

        Args:
            now: the moment in seconds since the epoch; the time of the last event by default.
        """
        if self._first is None:
            return Goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        if now is not None:
            self._pass_time(now)
        self._close_attempt()
        productive = sum(window.total for window in self._windows)
        wall = (self._now or 0.0) - self._first - self._uncounted
        named = (productive, self._startup, self._evaluation, self._checkpoint, self._lost, self._down)
        return Goodput(wall, *named, max(0.0, wall - sum(named)))

    def _pass_time(self, at: float) -> None:
        """Advances the clock. Time in which the run was queued, stopped or finished does not count as wall time."""
        last = at if self._now is None else self._now
        # An end event that is written late can have an earlier time than the event before it.
        self._now = max(at, last)
        if not self._state.is_wanted:
            self._uncounted += self._now - last

    def _take_metrics(self, step: int, values: dict[str, float]) -> None:
        assert self._now is not None
        if (seconds := values.get(FIRST_STEP)) is not None:
            self._begin(seconds)
        self._evaluation += values.get("eval/seconds", 0.0)
        self._checkpoint += values.get("checkpoint/stall_seconds", 0.0)
        if (seconds := values.get("throughput/step_seconds")) is not None and step > self._position:
            self._attempt.append(_Window(self._position + 1, step, seconds))
            self._position = self.last_step = step
        if not values.keys() <= self._account:
            self._worked = (self._now, self._uncounted)

    def _begin(self, to_first_step: float) -> None:
        """Takes the first step of an attempt. The attempt itself began `to_first_step` seconds ago."""
        assert self._now is not None
        assert self._first is not None
        begin = self._now - to_first_step
        if self._worked is None:
            # The launcher starts shortly before it writes its first line to the journal.
            self._first = min(self._first, begin)
        else:
            then, uncounted = self._worked
            self._down += max(0.0, begin - then - (self._uncounted - uncounted))
        self._close_attempt()
        self._starting = to_first_step

    def _rewind(self, step: int) -> None:
        """Continues after `step`. Journalled steps beyond it are lost; steps up to it count even if not journalled."""
        self._reach(step)
        self._close_attempt()
        kept = []
        for window in self._windows:
            beyond = max(0, window.last - max(step, window.first - 1))
            self._lost += beyond * window.seconds
            if window.last - beyond >= window.first:
                kept.append(_Window(window.first, window.last - beyond, window.seconds))
        self._windows = kept
        self._position = step

    def _reach(self, step: int) -> None:
        """Counts the steps from the last log step up to `step`, with the step time of the last window."""
        if self._attempt and step > self._position:
            self._attempt.append(_Window(self._position + 1, step, self._attempt[-1].seconds))
            self._position = step

    def _close_attempt(self) -> None:
        """Ends an attempt. Its warm-up steps count with the usual step time; their excess is counted as start-up."""
        if self._attempt:
            usual = _usual(self._attempt[1:] or self._attempt)
            first, *others = self._attempt
            for window in others[:1]:  # Warm-up ends within this window.
                self._startup += max(0.0, window.seconds - usual) * (window.last - window.first + 1)
                window.seconds = min(window.seconds, usual)
            first.seconds = min(first.seconds, usual)
            if self._starting is not None:
                self._startup += max(0.0, self._starting - first.seconds)
                self._starting = None
            self._windows += self._attempt
            self._attempt = []
        elif self._starting is not None:
            self._startup += self._starting
            self._starting = None


def _usual(windows: list[_Window]) -> float:
    """The median step time, weighted by the number of steps in each window."""
    ordered = sorted(windows, key=lambda window: window.seconds)
    half = sum(window.last - window.first + 1 for window in ordered) / 2
    for window in ordered:
        half -= window.last - window.first + 1
        if half <= 0:
            break
    return window.seconds


def goodput(taken: Iterable[Event], now: float | None = None) -> Goodput:
    """The account of a journal's events from its beginning. `now` is as in `Ledger.result`."""
    return _ledger(taken).result(now)


def _ledger(taken: Iterable[Event]) -> Ledger:
    ledger = Ledger()
    for event in taken:
        ledger.take(event)
    return ledger


def journal_goodput(journal: Journal) -> Goodput | None:
    """Journals the account of a run that ends now. For a run without a step it journals nothing and returns None."""
    ledger = _ledger(iterate(journal.path))
    if not ledger.last_step:
        return None
    found = ledger.result(time.time())
    journal.metrics(ledger.last_step, found.metrics())
    return found
