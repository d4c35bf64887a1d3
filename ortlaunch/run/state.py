"""What a run's events amount to: one fold, which all that shows or continues a run reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ortlaunch.run import events
from ortlaunch.run.events import Event, Status

STEPS_KEY = "train.steps"
STATE_TAG = "ortlaunch.state"
REASON_TAG = "ortlaunch.requeue_reason"
STOPPED_TAG = "ortlaunch.stopped_at_step"
FIRST_STEP = "startup/time_to_first_step_seconds"
"""Metric that comes with the first step of each attempt."""
_RATES = ("throughput/tokens_per_second", "throughput/samples_per_second")
_MEDIANS = ("summary/tokens_per_second_median", "summary/samples_per_second_median")
_UNWANTED_AFTER = ("KILLED", "FINISHED")


@dataclass
class RunState:
    """What the events so far say. None stands for what they do not say."""

    experiment: str | None = None
    name: str | None = None
    run_id: str | None = None
    attempts: int = 0
    """How often the run was launched."""
    began: int | None = None
    """When the latest attempt began, in milliseconds: its launch, or the start of its job. None while a job waits."""
    last_began: int | None = None
    """When the last job began that has run; an attempt that waits does not take it back."""
    steps: int | None = None
    """Steps that the run is to make."""
    nodes: int = 1
    step: int | None = None
    """The last step journalled."""
    trains: bool = False
    """Whether the latest attempt has made its first step."""
    figures: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    log_step: dict[str, float] = field(default_factory=dict)
    """The metrics of the latest log step."""
    medians: dict[str, float] = field(default_factory=dict)
    """Rates over the steady steps, where the run has come to its end and said so."""
    tags: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """The first failure since the latest attempt began, in one line."""
    ended: Status | None = None
    """How the run ended, where that is the journal's last word."""
    ended_at: int | None = None
    """When that was, in milliseconds: an export may add to the journal of a run that is over."""
    last_end: int | None = None
    """When the latest attempt that is over ended; a new attempt does not take it back."""
    is_wanted: bool = True
    """Whether the run is to go on: not while its job waits in a queue, nor after a stop or a finish. It is wanted after
    a failure, which somebody has to repair."""
    last: int | None = None
    """Time of the last event in milliseconds."""

    def take(self, event: Event) -> None:
        """Takes the next event."""
        self.last = event.t
        match event:
            case events.Started():
                self._start(event)
            case events.ParamsSet():
                self.steps = _number(event.values.get(STEPS_KEY)) or self.steps
                self.nodes = _number(event.values.get("launcher.nodes")) or self.nodes
            case events.Tagged():
                self._tag(event)
            case events.Measured():
                self._measure(event)
            case events.Rewound():
                self.step = event.step
            case events.Requeued():
                self.tags[REASON_TAG] = event.reason
            case events.WorkerFailed():
                said = [line.strip() for line in event.message.splitlines() if line.strip()]
                self.failure = self.failure or f"rank {event.rank} on {event.host}: {said[-1] if said else ''}"
            case events.Ended():
                self.ended, self.ended_at, self.last_end = event.status, event.t, event.t
                self.is_wanted = event.status not in _UNWANTED_AFTER

    @property
    def loss(self) -> float | None:
        """The training loss of the latest log step."""
        return self.log_step.get(events.LOSS)

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Tokens and samples per second at the latest log step."""
        tokens, samples = (self.log_step.get(name) for name in _RATES)
        return tokens, samples

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step at the latest log step that says."""
        return self.figures.get("throughput/step_seconds")

    @property
    def median_rates(self) -> tuple[float | None, float | None]:
        """Tokens and samples per second over the steady steps."""
        tokens, samples = (self.medians.get(name) for name in _MEDIANS)
        return tokens, samples

    def _start(self, event: events.Started) -> None:
        self.experiment, self.name, self.run_id = event.experiment, event.name, event.run_id
        self.attempts += 1
        self.began = event.t
        self.ended, self.ended_at, self.failure = None, None, ""
        self.is_wanted, self.trains = True, False

    def _tag(self, event: events.Tagged) -> None:
        self.tags |= event.values
        said = event.values.get(STATE_TAG)
        if said == "running":
            self.began = self.last_began = event.t
            self.is_wanted = True
        elif said == "queued":
            # The job only waits from here on.
            self.began = None
            self.is_wanted = False

    def _measure(self, event: events.Measured) -> None:
        self.figures |= event.values
        self.trains |= FIRST_STEP in event.values
        if event.is_log_step or event.values.keys() & set(_MEDIANS):
            # A log step after a summary is one of a run that goes on.
            self.medians = {name: event.values[name] for name in _MEDIANS if name in event.values}
        if event.is_log_step:
            self.step, self.log_step = event.step, event.values


def fold(taken: Iterable[Event]) -> RunState:
    """The state after these events, from a journal's beginning."""
    state = RunState()
    for event in taken:
        state.take(event)
    return state


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
