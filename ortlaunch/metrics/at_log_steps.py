"""The metrics that every worker measures at a log step; the run records the largest value over its workers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ortlaunch.base.modules import NamedModules

Measure = Callable[[torch.device], dict[str, float]]
"""Takes the worker's device and gives values by MLflow metric name: the same names on every worker, for the values of
all workers travel in one collective. It must not wait for the device, which is the loop's to do."""

_MEASURES = NamedModules[Measure]("ortlaunch.metrics.worker")


def measured_by_every_worker(name: str) -> Callable[[Measure], Measure]:
    """Registers a function of the module `name` of `metrics/worker/`."""

    def register(measure: Measure) -> Measure:
        _MEASURES.register(name, measure)
        return measure

    return register


def worker_metrics(device: torch.device) -> dict[str, float]:
    """What this worker measures now, by MLflow metric name."""
    return {name: value for measure in _MEASURES.values() for name, value in measure(device).items()}
