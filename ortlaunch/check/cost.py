"""Measures the cost of each backend by a trial: a run of a few steps with one worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ortlaunch.check.report import BackendCost, Cost
from ortlaunch.config.candidates import plain_backend
from ortlaunch.config.precisions import BACKENDS
from ortlaunch.config.schema import Config, LocalConfig, NoTrackingConfig, OrtConfig
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.launch.trial import Limits, Outcome, short, tried
from ortlaunch.run.run import Run

_STEPS = 7
_ENOUGH_SECONDS = 8.0
"""A trial that has measured clearly longer is ended, so that a large model does not take minutes."""
_LONGEST_SECONDS = 900.0
_EXPORT = "startup/ort_export_seconds"


def check_cost(folder: Path, config: Config, threads: int) -> Cost:
    """Measures all backends one after the other.

    Args:
        folder: takes the trials.
        config: the configuration of the run.
        threads: number of threads of a worker.
    """
    costs, export = {}, None
    for backend in BACKENDS:
        trial = short(_with(config, backend, threads, folder), _STEPS, log_every=1)
        outcome = tried(trial, Limits(_LONGEST_SECONDS), folder / f"cost-{backend}", seconds=_ENOUGH_SECONDS)
        costs[backend] = _cost(outcome, config.train.batch_size)
        if backend == "ort" and outcome.ok:
            export = Run(Path(outcome.run)).state().figures.get(_EXPORT)
    return Cost(
        "warning" if any(cost.error for cost in costs.values()) else "ok",
        batch_size=config.train.batch_size,
        threads=threads,
        backends=costs,
        export_seconds=export,
        pays_off_after_steps=pays_off_after(export, costs["eager"].step_seconds, costs["ort"].step_seconds),
    )


def pays_off_after(export: float | None, eager: float | None, ort: float | None) -> int | None:
    """Returns the steps after which the saved time exceeds the export's; None if that is never or not known."""
    if export is None or eager is None or ort is None or ort >= eager:
        return None
    return int(export / (eager - ort)) + 1


def _cost(outcome: Outcome, batch: int) -> BackendCost:
    if not outcome.ok:
        return BackendCost(error=outcome.reason)
    return BackendCost(
        step_seconds=batch / outcome.rate,
        start_seconds=outcome.start,
        peak_memory_gib=outcome.worker_bytes / 2**30,
    )


def _with(config: Config, name: str, threads: int, folder: Path) -> Config:
    """The run with a backend, one micro-batch to a step, and one worker whose run goes away with the folder."""
    backend = config.backend if config.backend.name == name else plain_backend(name)
    if isinstance(backend, OrtConfig):
        # The cost of an export is measured, so it must not come from the cache.
        backend = dataclasses.replace(backend, export_cache=False)
    return dataclasses.replace(
        config,
        backend=backend,
        trainer=TRAINERS["single"].schema(),
        train=dataclasses.replace(config.train, grad_accumulation=1),
        launcher=LocalConfig(workers_per_node=1, threads=threads, allocator=config.launcher.allocator),
        run_root=str(folder / "runs"),
        tracking=NoTrackingConfig(),
        trackers={},
    )
