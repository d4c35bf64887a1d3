"""Reads one run from MLflow."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortlaunch.config import trainers
from ortlaunch.run.names import CHANGED_PARAM
from ortlaunch.run.state import STOPPED_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run

RATES = ("tokens_per_second_median", "samples_per_second_median")
"""Rates from which a speed-up may be computed; the first that both runs have is used."""
MEMORY = "peak_memory_gib"
_RATE_CURVES = ("throughput/tokens_per_second", "throughput/samples_per_second")
_MEMORY_CURVES = ("memory/peak_allocated_gib", "memory/rss_gib")
_LOSS = "train/loss"
_CHECKPOINT = "checkpoint/write_seconds"
_LOSS_CURVES = (_LOSS,)
STEPS_TAKEN = "steps taken"
"""Treated as a parameter of runs that ended normally; after a crash the number is not known."""
_INFINITE = 1.797e308
"""MLflow's databases store the largest double in place of infinity."""
_TAGS = "ortlaunch."
_STOPPED = "STOPPED"


@dataclass(frozen=True)
class Quotient:
    """A figure of a run divided by the baseline's, with both values."""

    ratio: float
    metric: str
    value: float
    baseline_value: float


@dataclass(frozen=True)
class RunRow:
    """The row of one run in a comparison; None stands for what MLflow does not have."""

    name: str
    run_id: str
    status: str
    """MLflow's status; STOPPED for a run that was stopped on request, which is KILLED in MLflow."""
    model: str | None = None
    backend: str | None = None
    ort_active: bool | None = None
    trainer: str | None = None
    world_size: str | None = None
    tokens_per_second_median: float | None = None
    samples_per_second_median: float | None = None
    step_seconds_p50: float | None = None
    step_seconds_p95: float | None = None
    peak_memory_gib: float | None = None
    last_loss: float | None = None
    step: int | None = None
    """The last logged step of a run that has not finished."""
    steady_windows: float | None = None
    other_cpu_percent: float | None = None
    started: int = 0
    """Milliseconds since the epoch."""
    experiment_id: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """The tags of ortlaunch."""
    curves: tuple[str, ...] = ()
    """The metrics to plot: throughput, memory, loss."""
    speedup: Quotient | None = None
    memory: Quotient | None = None
    own_id: str = ""
    """ortlaunch's short id, where that is shown and not MLflow's."""

    @property
    def short_id(self) -> str:
        """What tells the run from others of its name."""
        return self.own_id or self.run_id[:8]

    @property
    def suspect(self) -> bool:
        """Whether the run asked for ONNX Runtime and has figures, but nothing shows that it used ONNX Runtime."""
        return self.backend == "ort" and self.ort_active is not True and self.has_figures

    @property
    def has_figures(self) -> bool:
        """Whether there are figures to compare; a run that failed at its start has none."""
        figures = (*(getattr(self, metric) for metric in (*RATES, MEMORY)), self.last_loss)
        return self.status == "FINISHED" or any(value is not None for value in figures)

    def figure(self, metric: str) -> float | None:
        """Returns a figure by its name; None if it is missing or not finite."""
        value: float | None = getattr(self, metric)
        return value if value is not None and math.isfinite(value) else None


def row_of(run: Run) -> RunRow:
    """Builds the row of a run from MLflow's data."""
    tags, params, metrics = run.data.tags, run.data.params, run.data.metrics
    step = None if run.info.status == "FINISHED" else _last_step(run)
    return RunRow(
        name=run.info.run_name or run.info.run_id[:8],
        run_id=run.info.run_id,
        status=_STOPPED if run.info.status == "KILLED" and _was_stopped(tags, step) else run.info.status,
        model=params.get("model.name"),
        backend=tags.get("ortlaunch.backend"),
        ort_active={"true": True, "false": False}.get(tags.get("ortlaunch.ort_active", "")),
        trainer=trainers.label(tags.get("ortlaunch.trainer"), params),
        world_size=tags.get("ortlaunch.world_size"),
        last_loss=logged_number(metrics.get(_LOSS)),
        step=step,
        tokens_per_second_median=logged_number(metrics.get("summary/tokens_per_second_median")),
        samples_per_second_median=logged_number(metrics.get("summary/samples_per_second_median")),
        step_seconds_p50=logged_number(metrics.get("summary/step_seconds_p50")),
        step_seconds_p95=logged_number(metrics.get("summary/step_seconds_p95")),
        peak_memory_gib=logged_number(metrics.get("summary/peak_memory_gib")),
        steady_windows=logged_number(metrics.get("summary/steady_windows")),
        other_cpu_percent=logged_number(metrics.get("summary/other_cpu_percent")),
        started=run.info.start_time or 0,
        experiment_id=str(run.info.experiment_id),
        params=_shared(_with_changes(_with_steps(params, metrics), tags), ""),
        tags=_shared(tags, _TAGS),
        curves=_curves(metrics),
    )


def _was_stopped(tags: Mapping[str, str], step: int | None) -> bool:
    """Whether a run was stopped on request, and did not go on after that."""
    stopped = tags.get(STOPPED_TAG, "")
    return stopped.isdecimal() and (step or 0) <= int(stopped)


def _last_step(run: Run) -> int | None:
    """The last step that was logged or is in a checkpoint: a run that is asked to stop ends between two log steps."""
    logged = run.data.to_proto().metrics if _LOSS in run.data.metrics else ()
    return max((int(metric.step) for metric in logged if metric.key in (_LOSS, _CHECKPOINT)), default=None)


def _with_steps(params: Mapping[str, str], metrics: Mapping[str, float]) -> dict[str, str]:
    """Adds the steps taken to the parameters; a resumed run may have made more steps than its parameters say."""
    reached = metrics.get("summary/last_step")
    return dict(params) if reached is None else {**params, STEPS_TAKEN: f"{reached:.0f}"}


def _with_changes(params: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """Adds what a resume changed; a run that began with another value is no repeat of one that had it throughout."""
    changed = {key.removeprefix(CHANGED_PARAM): value for key, value in tags.items() if key.startswith(CHANGED_PARAM)}
    return {**params, **{key: f"{params[key]}, then {value}" for key, value in changed.items() if key in params}}


def _shared(values: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Returns the pairs under a prefix; equal texts of many runs share their memory."""
    return {sys.intern(key): sys.intern(value) for key, value in values.items() if key.startswith(prefix)}


def _curves(metrics: Mapping[str, float]) -> tuple[str, ...]:
    kinds = (_RATE_CURVES, _MEMORY_CURVES, _LOSS_CURVES)
    firsts = (next((sys.intern(key) for key in kind if key in metrics), None) for kind in kinds)
    return tuple(key for key in firsts if key is not None)


def logged_number(value: float | None) -> float | None:
    """Restores an infinity that MLflow's database stored as the largest double."""
    return math.copysign(math.inf, value) if value is not None and abs(value) >= _INFINITE else value
