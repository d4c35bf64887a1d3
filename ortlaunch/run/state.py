"""The state of a run: a fold over its events. All code that shows or continues a run uses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ortlaunch.run import events
from ortlaunch.run.events import Event, Status

STEPS_KEY = "train.steps"
STEPS_TAG = "ortlaunch.steps"
"""The steps of a run whose length the workers count, by epochs or tokens."""
STATE_TAG = "ortlaunch.state"
SCRIPT_TAG = "ortlaunch.script"
"""The script that the workers run; absent for a training in ortlaunch's own loop."""
CODE_TAG = "ortlaunch.code"
"""A digest of the user's own code that ran; absent where there is none."""
APART_TAG = "ortlaunch.exchanged_nothing"
"""Why the workers of a script trained separate copies of a model; absent where they did not."""
REASON_TAG = "ortlaunch.requeue_reason"
STOPPED_TAG = "ortlaunch.stopped_at_step"
ENDED_TAG = "ortlaunch.ended_because"
"""Why another than the run's own command has ended it: `ortlaunch tune` a trial, a service a run beyond its limits."""
STANDING_TAG = "ortlaunch.standing_still"
"""The workers that stand still while others wait for them, since when and on which host; else `NOBODY_STANDS`."""
NOBODY_STANDS = "none"
OUTAGE_TAG = "ortlaunch.tracker_outage"
"""The trackers that take no events, or took none for a while, and since when."""
FIRST_STEP = "startup/time_to_first_step_seconds"
"""The metric that each attempt journals with its first step."""
_RATES = ("throughput/tokens_per_second", "throughput/samples_per_second")
_MEDIANS = ("summary/tokens_per_second_median", "summary/samples_per_second_median")
_DIGITS = 16
"""A number with as many digits is damage. Python refuses to parse thousands of them."""
_UNWANTED_AFTER = ("KILLED", "FINISHED")


@dataclass
class RunState:
    """The state after the events taken so far. A field is None while no event has set it."""

    experiment: str | None = None
    name: str | None = None
    run_id: str | None = None
    attempts: int = 0
    """How often the run was launched."""
    began: int | None = None
    """When the latest attempt began, in milliseconds: its launch, or the start of its job. None while a job waits."""
    last_began: int | None = None
    """When the latest job that has run began, in milliseconds. An attempt that waits in the queue does not reset it."""
    steps: int | None = None
    """The number of steps that the run is to make."""
    nodes: int = 1
    step: int | None = None
    """The last journalled step."""
    trains: bool = False
    """Whether the latest attempt has taken its first step."""
    figures: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    log_step: dict[str, float] = field(default_factory=dict)
    """The metrics of the latest log step."""
    medians: dict[str, float] = field(default_factory=dict)
    """The rates over the steady steps, which a run journals when it finishes."""
    tags: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """The first failure since the latest attempt began, in one line."""
    ended: Status | None = None
    """How the run ended; None if another attempt has begun since, or the run has not ended."""
    ended_at: int | None = None
    """When the run ended, in milliseconds. Later events are possible: an export may add some."""
    last_end: int | None = None
    """When the latest finished attempt ended, in milliseconds. A new attempt does not reset it."""
    standing: str = ""
    """The workers of this attempt that stand still; empty if there are none."""
    is_wanted: bool = True
    """Whether the run should be running. It is false while its job waits in a queue, and after a stop or a finish. It
    is true after a failure, which has to be repaired."""
    last: int | None = None
    """The time of the last event in milliseconds."""

    def take(self, event: Event) -> None:
        """Takes the next event."""
        self.last = event.t
        match event:
            case events.Started():
                self._start(event)
            case events.ParamsSet():
                self.steps = number(event.values.get(STEPS_KEY)) or self.steps
                self.nodes = number(event.values.get("launcher.nodes")) or self.nodes
            case events.Tagged():
                self._tag(event)
            case events.Measured():
                self._measure(event)
            case events.Rewound():
                self.step = event.step
                self.standing = ""
            case events.Requeued():
                self.tags[REASON_TAG] = event.reason
            case events.WorkerFailed():
                said = [line.strip() for line in event.message.splitlines() if line.strip()]
                self.failure = self.failure or f"rank {event.rank} on {event.host}: {said[-1] if said else ''}"
            case events.Ended():
                self.ended, self.ended_at, self.last_end = event.status, event.t, event.t
                self.is_wanted = event.status not in _UNWANTED_AFTER
                self.standing = ""

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
        """Seconds per step, as last journalled."""
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
        self.tags.pop(ENDED_TAG, None)
        self.is_wanted, self.trains = True, False
        self.standing = ""

    def _tag(self, event: events.Tagged) -> None:
        self.tags |= event.values
        self.steps = number(event.values.get(STEPS_TAG)) or self.steps
        if (standing := event.values.get(STANDING_TAG)) is not None:
            self.standing = "" if standing == NOBODY_STANDS else standing
        said = event.values.get(STATE_TAG)
        if said == "running":
            self.began = self.last_began = event.t
            self.is_wanted = True
        elif said == "queued":
            # From now on the job waits in the queue.
            self.began = None
            self.is_wanted = False

    def _measure(self, event: events.Measured) -> None:
        self.figures |= event.values
        self.trains |= FIRST_STEP in event.values
        if event.is_log_step or event.values.keys() & set(_MEDIANS):
            # A log step after the summary shows that the run was continued, so the old medians no longer hold.
            self.medians = {name: event.values[name] for name in _MEDIANS if name in event.values}
        if event.is_log_step:
            self.step, self.log_step = event.step, event.values


def fold(taken: Iterable[Event]) -> RunState:
    """The state after these events, which start at the journal's beginning."""
    state = RunState()
    for event in taken:
        state.take(event)
    return state


def number(text: str | None) -> int | None:
    """The number that a tag or parameter holds; None if it holds none."""
    return int(text) if text is not None and len(text) < _DIGITS and text.isdecimal() else None
