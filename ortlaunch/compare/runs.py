"""Reads one run: from MLflow, or from the journal in its folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words
from ortlaunch.config import trainers
from ortlaunch.run.events import LOSS, Event, Started
from ortlaunch.run.journal import iterate
from ortlaunch.run.names import CHANGED_PARAM, RUN_ID_TAG
from ortlaunch.run.run import Run
from ortlaunch.run.state import STOPPED_TAG, RunState
from ortlaunch.tracking.translate import Ended, Operation, Params, Point, Points, Reopened, Tags, Translator

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun

RATES = ("summary/tokens_per_second_median", "summary/samples_per_second_median")
"""Rates from which a speed-up may be computed; the first that both runs have is used."""
MEMORY = "summary/peak_memory_gib"
STEPS_TAKEN = "steps taken"
"""Treated as a parameter of runs that ended normally; after a crash the number is not known."""
_CHECKPOINT = "checkpoint/write_seconds"
_INFINITE = 1.797e308
"""MLflow's databases store the largest double in place of infinity."""
_TAGS = "ortlaunch."


@dataclass(frozen=True)
class RunRow:
    """One run in a comparison."""

    name: str
    run_id: str
    """MLflow's id; ortlaunch's short id for a run that MLflow does not have."""
    status: str
    """MLflow's status; STOPPED for a run that was stopped on request, which is KILLED in MLflow."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """The tags of ortlaunch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The value of each metric at its last step."""
    step: int | None = None
    """The last logged step of a run that has not finished."""
    started: int = 0
    """Milliseconds since the epoch."""
    experiment_id: str = ""
    folder: Path | None = None
    """The run folder whose journal was read; None for a run that was read from MLflow."""
    own_id: str = ""
    """ortlaunch's short id, where that is shown and not MLflow's."""

    @property
    def short_id(self) -> str:
        """What tells the run from others of its name."""
        return self.own_id or self.run_id[:8]

    @property
    def model(self) -> str | None:
        """The model's name."""
        return self.params.get("model.name")

    @property
    def backend(self) -> str | None:
        """The backend that was asked for."""
        return self.tags.get("ortlaunch.backend")

    @property
    def ort_active(self) -> bool | None:
        """Whether ONNX Runtime ran the model; None if the run does not say."""
        return {"true": True, "false": False}.get(self.tags.get("ortlaunch.ort_active", ""))

    @property
    def trainer(self) -> str | None:
        """The trainer, with its ZeRO stage."""
        return trainers.label(self.tags.get("ortlaunch.trainer"), self.params)

    @property
    def last_loss(self) -> float | None:
        """The training loss at the last log step."""
        return self.metrics.get(LOSS)

    @property
    def suspect(self) -> bool:
        """Whether the run asked for ONNX Runtime and has figures, but nothing shows that it used ONNX Runtime."""
        return self.backend == "ort" and self.ort_active is not True and self.has_figures

    @property
    def has_figures(self) -> bool:
        """Whether there are figures to compare; a run that failed at its start has none."""
        return self.status == "FINISHED" or any(metric in self.metrics for metric in (*RATES, MEMORY, LOSS))

    def figure(self, metric: str) -> float | None:
        """Returns a figure by its name; None if it is missing or not finite."""
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None


def of_mlflow(run: MlflowRun) -> RunRow:
    """Builds the row of a run from MLflow's data."""
    info, data = run.info, run.data
    # MLflow's own dictionary of the metrics lacks their steps.
    steps = {} if info.status == "FINISHED" else {one.key: int(one.step) for one in data.to_proto().metrics}
    metrics = {sys.intern(key): logged_number(value) for key, value in data.metrics.items()}
    row = RunRow(info.run_name or info.run_id[:8], info.run_id, info.status, data.params, data.tags, metrics)
    return _completed(replace(row, started=info.start_time or 0, experiment_id=str(info.experiment_id)), steps)


def of_folder(folder: Path) -> RunRow:
    """Builds the row of a run from its journal, as MLflow would have it.

    Raises:
        RequestError: the journal cannot be read, or no run has begun in it.
    """
    run, status, last = Run(folder), "RUNNING", dict[str, Point]()
    params, tags = dict[str, str](), dict[str, str]()
    begun = next((event for event in _events(folder) if isinstance(event, Started)), None)
    if begun is None:
        raise RequestError(f"{folder}: no run has begun in its journal")
    for operation in _operations(folder):
        match operation:
            case Params():
                params |= operation.values
            case Tags():
                tags |= operation.values
            case Points():
                for point in operation.points:
                    if point.key not in last or _moment(point) >= _moment(last[point.key]):
                        last[point.key] = point
            case Ended():
                status = operation.status
            case Reopened():
                status = "RUNNING"
    run.take_kept_end(kept := RunState())
    status = kept.ended or status if status == "RUNNING" else status
    tags[RUN_ID_TAG] = begun.run_id
    metrics, steps = {key: one.value for key, one in last.items()}, {key: one.step for key, one in last.items()}
    row = RunRow(begun.name, run.mlflow_run_id() or begun.run_id, status, params, tags, metrics)
    return _completed(replace(row, started=begun.t, folder=folder), steps)


def points_of(folder: Path, metrics: Iterable[str]) -> dict[str, list[Point]]:
    """Reads all points of some metrics from a run's journal.

    Raises:
        RequestError: the journal cannot be read.
    """
    found: dict[str, list[Point]] = {metric: [] for metric in metrics}
    for operation in _operations(folder):
        for point in operation.points if isinstance(operation, Points) else ():
            if point.key in found:
                found[point.key].append(point)
    return found


def _operations(folder: Path) -> Iterator[Operation]:
    """Yields what the relay would send to MLflow, which resolves steps that a resumed run has repeated."""
    translator = Translator()
    for event in _events(folder):
        yield from translator.translate([event])


def _events(folder: Path) -> Iterator[Event]:
    journal = Run(folder).journal_file
    try:
        yield from iterate(journal)
    except OSError as error:
        raise RequestError(f"{journal} cannot be read: {in_words(error)}") from None


def _moment(point: Point) -> tuple[int, int]:
    return point.step, point.timestamp


def _completed(row: RunRow, steps: Mapping[str, int]) -> RunRow:
    """Adds what follows from the tags, and the last step of a run that has not finished."""
    is_open = row.status != "FINISHED" and LOSS in steps
    # A run that is asked to stop ends between two log steps, at its checkpoint.
    step = max(steps[key] for key in (LOSS, _CHECKPOINT) if key in steps) if is_open else None
    stopped = row.tags.get(STOPPED_TAG, "")
    # A run that went on after it was stopped and was then killed was killed.
    was_stopped = row.status == "KILLED" and stopped.isdecimal() and (step or 0) <= int(stopped)
    params, changed = dict(row.params), len(CHANGED_PARAM)
    if (reached := row.metrics.get("summary/last_step")) is not None:
        # A resumed run may have made more steps than its parameters say.
        params[STEPS_TAKEN] = f"{reached:.0f}"
    for key, value in ((tag[changed:], value) for tag, value in row.tags.items() if tag.startswith(CHANGED_PARAM)):
        # A run that began with another value is no repeat of one that had this value throughout.
        params |= {key: f"{params[key]}, then {value}"} if key in params else {}
    shared, tags = _shared(params, ""), _shared(row.tags, _TAGS)
    return replace(row, status="STOPPED" if was_stopped else row.status, params=shared, tags=tags, step=step)


def _shared(values: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Returns the pairs under a prefix; equal texts of many runs share their memory."""
    return {sys.intern(key): sys.intern(value) for key, value in values.items() if key.startswith(prefix)}


def logged_number(value: float) -> float:
    """Restores an infinity that MLflow's database stored as the largest double."""
    return math.copysign(math.inf, value) if abs(value) >= _INFINITE else value
