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

    wall: float = 0.0
    """From the first start to the end, without the time in a queue and the time after a stop or a finish."""
    productive: float = 0.0
    """The time of optimizer steps that were not repeated."""
    startup: float = 0.0
    """The time up to the first step (processes, imports, building, export, compilation), and the time that warm-up
    steps take in excess of the later steps."""
    evaluation: float = 0.0
    checkpoint: float = 0.0
    """The time in which training waited for a checkpoint."""
    lost: float = 0.0
    """The time of steps that were repeated because no checkpoint held them."""
    down: float = 0.0
    """The time between an attempt's last journalled work and the start of the next attempt: work that was not
    journalled, a failure that nobody noticed yet, the restart."""

    @property
    def other(self) -> float:
        """The rest: logging, starts that led to no step, writing the weights at the end."""
        named = (self.productive, self.startup, self.evaluation, self.checkpoint, self.lost, self.down)
        return max(0.0, self.wall - sum(named))

    @property
    def percent(self) -> float:
        """The productive share."""
        return 100.0 * self.productive / self.wall if self.wall > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The account as metrics, by their names in MLflow."""
        parts = ("productive", "startup", "evaluation", "checkpoint", "lost", "down", "other", "wall")
        seconds = {f"goodput/{part}_seconds": getattr(self, part) for part in parts}
        return {"summary/goodput_percent": self.percent} | seconds


ACCOUNT = Goodput().metrics().keys()
"""Metrics that are journalled at each end of a run, and of which the latest holds. They do not show that it worked at
that time."""


_SET_BACK_SECONDS = 60.0
"""An event that is earlier than the one before it by more than this shows that the machine's clock was set back."""


class Ledger:
    """Takes a journal's events in order and adds up the parts of a `Goodput`."""

    def __init__(self) -> None:
        self._run = RunState()
        self._clock: _Clock | None = None
        self._steps = _Steps()
        self._evaluation = self._checkpoint = self._down = 0.0
        self._last_work: float | None = None
        """When the last metric was journalled, on the clock."""

    @property
    def last_step(self) -> int:
        """The furthest step that was journalled; 0 if there is none."""
        return self._steps.last_journalled

    def take(self, event: Event) -> None:
        """Takes the next event."""
        at = event.t / 1000.0
        if self._clock is None:
            self._clock = _Clock(at)
        self._clock.advance(at, counts=self._run.is_wanted)
        self._run.take(event)
        if isinstance(event, events.Tagged):
            if (step := event.values.get(STOPPED_TAG)) is not None and step.isdigit():
                self._steps.reach(int(step))
        elif isinstance(event, events.Rewound):
            self._steps.rewind(event.step)
        elif isinstance(event, events.Measured):
            self._take_metrics(event.step, event.values, self._clock)

    def result(self, now: float | None = None) -> Goodput:
        """The account as of a moment.

        Args:
            now: the moment in seconds since the epoch; the time of the last event by default.
        """
        if self._clock is None:
            return Goodput()
        if now is not None:
            self._clock.advance(now, counts=self._run.is_wanted)
        self._steps.close_attempt()
        return Goodput(
            wall=self._clock.wall,
            productive=self._steps.productive,
            startup=self._steps.startup,
            evaluation=self._evaluation,
            checkpoint=self._checkpoint,
            lost=self._steps.lost,
            down=self._down,
        )

    def _take_metrics(self, step: int, values: dict[str, float], clock: _Clock) -> None:
        if (seconds := values.get(FIRST_STEP)) is not None:
            self._begin_attempt(clock.now - seconds, clock)
            self._steps.begin_attempt(seconds)
        self._evaluation += values.get("eval/seconds", 0.0)
        self._checkpoint += values.get("checkpoint/stall_seconds", 0.0)
        if (seconds := values.get("throughput/step_seconds")) is not None:
            self._steps.take(step, seconds)
        if not values.keys() <= ACCOUNT:
            self._last_work = clock.now

    def _begin_attempt(self, began: float, clock: _Clock) -> None:
        """Takes the time on the clock at which an attempt began. The journal has only its first step."""
        if self._last_work is None:
            # The launcher starts shortly before it writes its first line to the journal.
            clock.first = min(clock.first, began)
        else:
            self._down += max(0.0, began - self._last_work)


class _Clock:
    """A clock that stands still while the run is not wanted: while it is queued, stopped or finished."""

    def __init__(self, at: float) -> None:
        """
        Args:
            at: the time of the first event, in seconds since the epoch.
        """
        self.first = self.now = at
        self._at = at

    @property
    def wall(self) -> float:
        """The time since the first event that counts."""
        return self.now - self.first

    def advance(self, at: float, *, counts: bool) -> None:
        """Advances to a time in seconds since the epoch.

        Args:
            at: the time. An end event that is written late can have an earlier time than the event before it.
            counts: whether the time since the last call counts.
        """
        passed = max(0.0, at - self._at)
        # An end that is journalled late is a few seconds earlier at most. Otherwise the clock was set back, and the
        # time that passed meanwhile is not known.
        self._at = at if at < self._at - _SET_BACK_SECONDS else self._at + passed
        if counts:
            self.now += passed


@dataclass
class _Window:
    """The steps `first` to `last`, both included, which took `seconds` each."""

    first: int
    last: int
    seconds: float

    @property
    def steps(self) -> int:
        return max(0, self.last - self.first + 1)

    @property
    def total(self) -> float:
        return self.steps * self.seconds

    def cap(self, seconds: float) -> float:
        """Lowers the step time to `seconds` at most; returns how much shorter the whole window is then."""
        before = self.total
        self.seconds = min(self.seconds, seconds)
        return before - self.total


class _Steps:
    """The time of the optimizer steps: of those that count, of those that were lost, and of the attempts' starts."""

    def __init__(self) -> None:
        self.last_journalled = 0
        self.startup = 0.0
        self.lost = 0.0
        self._reached = 0
        """The step that training has reached."""
        self._earlier: list[_Window] = []
        """Steps of earlier attempts that still count."""
        self._attempt: list[_Window] = []
        self._to_first_step = 0.0
        """How long the attempt took up to the end of its first step."""

    @property
    def productive(self) -> float:
        """The time of the steps that count, without those of an attempt that is not closed."""
        return sum(window.total for window in self._earlier)

    def begin_attempt(self, to_first_step: float) -> None:
        """Begins an attempt, which took `to_first_step` seconds up to the end of its first step."""
        self.close_attempt()
        self._to_first_step = to_first_step

    def take(self, step: int, seconds: float) -> None:
        """Takes a log step. The steps since the one before took `seconds` each."""
        if step > self._reached:
            self._attempt.append(_Window(self._reached + 1, step, seconds))
            self._reached = step
            # After a rewind the steps are smaller than those before. MLflow shows the value of the largest step.
            self.last_journalled = max(self.last_journalled, step)

    def reach(self, step: int) -> None:
        """Counts the steps from the last log step up to `step`, with the step time of the last window."""
        if self._attempt and step > self._reached:
            self._attempt.append(_Window(self._reached + 1, step, self._attempt[-1].seconds))
            self._reached = step

    def rewind(self, step: int) -> None:
        """Continues after `step`. Journalled steps beyond it are lost; steps up to it count even if not journalled."""
        self.reach(step)
        self.close_attempt()
        kept = [_Window(window.first, min(window.last, step), window.seconds) for window in self._earlier]
        self.lost += self.productive - sum(window.total for window in kept)
        self._earlier = [window for window in kept if window.steps]
        self._reached = step

    def close_attempt(self) -> None:
        """Ends an attempt. Its warm-up steps count with the usual step time; their excess is counted as start-up."""
        self.startup += _cap_warm_up(self._attempt)
        first_step = self._attempt[0].seconds if self._attempt else 0.0
        self.startup += max(0.0, self._to_first_step - first_step)
        self._to_first_step = 0.0
        self._earlier += self._attempt
        self._attempt = []


def _cap_warm_up(attempt: list[_Window]) -> float:
    """Lowers the step times of an attempt's warm-up to the usual one.

    Returns:
        The excess in the second window, in which warm-up ends. That of the first window, which is the first step, is a
        part of the time to the first step.
    """
    if not attempt:
        return 0.0
    usual = _usual(attempt[1:] or attempt)
    attempt[0].cap(usual)
    return sum(window.cap(usual) for window in attempt[1:2])


def _usual(windows: list[_Window]) -> float:
    """The median step time, weighted by the number of steps in each window."""
    ordered = sorted(windows, key=lambda window: window.seconds)
    half = sum(window.steps for window in ordered) / 2
    for window in ordered:
        half -= window.steps
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
