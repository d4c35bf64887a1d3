"""Goodput: which share of a run's wall time went into optimizer steps that counted, over all its attempts.

Computed from the journal alone. docs/metrics.md has the definitions in words.
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
    """Where a run's wall time went, in seconds; the parts add up to `wall`."""

    wall: float
    """From the first start to the end, without the time in a queue and that after a stop or a finish."""
    productive: float
    """Optimizer steps that were not repeated."""
    startup: float
    """Starting processes, imports, building, export, compilation: all up to the first step, and what the steps of
    warm-up take longer than those after them."""
    evaluation: float
    checkpoint: float
    """Training stood still for a checkpoint."""
    lost: float
    """Steps that were taken again because no checkpoint held them."""
    down: float
    """Between what an attempt journalled last and the next one's beginning: unnoticed death, work that was not
    journalled, restart."""
    other: float
    """The rest: logging, starts that led to no step, writing weights at the end."""

    @property
    def percent(self) -> float:
        """The productive share."""
        return 100.0 * self.productive / self.wall if self.wall > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """By MLflow metric name."""
        parts = ("productive", "startup", "evaluation", "checkpoint", "lost", "down", "other", "wall")
        seconds = {f"goodput/{part}_seconds": getattr(self, part) for part in parts}
        return {"summary/goodput_percent": self.percent} | seconds


@dataclass
class _Window:
    """Steps `first` to `last`, both included, took `seconds` each."""

    first: int
    last: int
    seconds: float

    @property
    def total(self) -> float:
        return (self.last - self.first + 1) * self.seconds


class Ledger:
    """Reads a journal's events, in order, and keeps the account."""

    def __init__(self) -> None:
        self.last_step = 0
        """The last step that was journalled."""
        self._now: float | None = None
        self._state = RunState()
        self._uncounted = 0.0
        self._first: float | None = None
        self._windows: list[_Window] = []  # Of earlier attempts, what still counts.
        self._attempt: list[_Window] = []
        self._position = 0
        self._worked: tuple[float, float] | None = None  # When a metric was last journalled, and _uncounted then.
        self._starting: float | None = None
        # Journalled at an end, not by work.
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
            now: seconds since the epoch; by default that of the last event.
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
        """Counts the time since the last event, unless the run was in a queue or nobody wanted it to go on."""
        last = at if self._now is None else self._now
        # A late end may bear an earlier time.
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
        """An attempt has taken its first step, which began `to_first_step` seconds ago."""
        assert self._now is not None
        assert self._first is not None
        begin = self._now - to_first_step
        if self._worked is None:
            # The launcher's own start comes shortly before its first line in the journal.
            self._first = min(self._first, begin)
        else:
            then, uncounted = self._worked
            self._down += max(0.0, begin - then - (self._uncounted - uncounted))
        self._close_attempt()
        self._starting = to_first_step

    def _rewind(self, step: int) -> None:
        """The next steps follow `step`: what was journalled beyond it is lost, what was not and is kept counts."""
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
        """Steps since the last log step that a checkpoint holds took as long as those before."""
        if self._attempt and step > self._position:
            self._attempt.append(_Window(self._position + 1, step, self._attempt[-1].seconds))
            self._position = step

    def _close_attempt(self) -> None:
        """The attempt's steps count as long as its usual one took; what its warm-up took longer belongs to start-up."""
        if self._attempt:
            usual = _usual(self._attempt[1:] or self._attempt)
            first, *others = self._attempt
            for window in others[:1]:  # The one in which warm-up ends.
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
    """The step time that half of the steps do not exceed."""
    ordered = sorted(windows, key=lambda window: window.seconds)
    half = sum(window.last - window.first + 1 for window in ordered) / 2
    for window in ordered:
        half -= window.last - window.first + 1
        if half <= 0:
            break
    return window.seconds


def goodput(taken: Iterable[Event], now: float | None = None) -> Goodput:
    """The account of a journal's events, all of them from its beginning; `now` as in `Ledger.result`."""
    return _ledger(taken).result(now)


def _ledger(taken: Iterable[Event]) -> Ledger:
    ledger = Ledger()
    for event in taken:
        ledger.take(event)
    return ledger


def journal_goodput(journal: Journal) -> Goodput | None:
    """Journals the account of a run that ends now; None, and nothing journalled, if it has taken no step."""
    ledger = _ledger(iterate(journal.path))
    if not ledger.last_step:
        return None
    found = ledger.result(time.time())
    journal.metrics(ledger.last_step, found.metrics())
    return found
