"""A finished run leaves the rate of its backend for later runs with ``backend=auto``."""

from __future__ import annotations

from ortlaunch.config import candidates
from ortlaunch.trainer.auto import kind
from ortlaunch.trainer.auto.decision import Rate
from ortlaunch.trainer.auto.lives import is_first_start
from ortlaunch.trainer.auto.rates import UNSURE_PERCENT, Rates
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.train import Trained

_LEAST_STEPS = 5
"""Steady steps that a rate needs."""


def note_rate(context: RunContext, trained: Trained) -> None:
    """Keeps the median step time and the start of a finished run; the first worker calls it.

    Runs are left out whose backend has other than its default keys, that were profiled, or in which ONNX Runtime was
    not active.
    """
    config, summary = context.config, trained.recorder.summary
    seconds = summary.get("summary/step_seconds_p50")
    if seconds is None or summary.get("summary/steady_steps", 0.0) < _LEAST_STEPS:
        return
    if not candidates.is_plain(config.backend) or config.profile is not None:
        return
    if config.backend.name == "ort" and not trained.parts.backend.is_active:
        return
    # The start of a run that goes on, or has begun again, holds more than a start.
    is_first = is_first_start(context.attempt, trained.parts.start.step)
    start = trained.recorder.time_to_first_step if is_first else None
    facts = kind.facts(config, world_size=context.workers.world_size, threads=context.workers.threads)
    # Of a second of training nobody knows what other processes took meanwhile.
    busy = summary.get("summary/other_cpu_percent", UNSURE_PERCENT)
    Rates(facts).note(config.backend.name, Rate(step_seconds=seconds, start_seconds=start), busy_percent=busy)
