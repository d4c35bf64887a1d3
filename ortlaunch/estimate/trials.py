"""Memory that no trace shows, by trials: real runs of a few steps with the run's micro-batch and with half of it.

ONNX Runtime and torch.compile decide themselves what they keep, and some models take another path with other data.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.base.private_folder import PrivateFolder
from ortlaunch.config.candidates import possible
from ortlaunch.config.devices import visible_gpus
from ortlaunch.config.schema import Config, LocalConfig, NoTrackingConfig, OrtConfig
from ortlaunch.estimate.band import NOTHING, any_of, by_trials, compilers_of, times, total
from ortlaunch.estimate.report import report
from ortlaunch.estimate.request import TRIED, Points, Request
from ortlaunch.launch.trial import Limits, ended_by_signals, short, tried
from ortlaunch.run.run import Run

_STEPS = 6
"""Steps of a trial: enough for a comparison of gradients, an evaluation, and a second checkpoint beside a step."""
_SECONDS = 900.0
_SHARE = 0.7
"""Share of the free memory that a trial may take; other processes may need some meanwhile."""
_HALVINGS = 3
"""How often a micro-batch that does not fit into the free memory is halved."""
_RESERVED = "memory/peak_reserved_gib"
_WHOLE_RUN = "whole run"


def with_trials(request: Request, config: Config, *, quiet: bool) -> Request:
    """The request with what trials show of the backends that cannot be traced."""
    names = {one.backend.name: one for one in possible(config) if one.backend.name in TRIED}
    if not names or (why := _why_no_trials(request, config)):
        return request if not names else replace(request, why_untried=why)
    found, failed = {}, ""
    for name, one in names.items():
        try:
            found[name] = _points(one, request, quiet=quiet)
        except RequestError as error:
            failed = f"and a trial of it failed ({error})"
    return replace(request, tried=found, why_untried=failed)


def untraced(request: Request, config: Config, reason: str, *, quiet: bool) -> dict[str, Any]:
    """The report of a run whose model cannot be traced.

    Args:
        request: its size and its limit, with the trials that were made.
        config: its configuration.
        reason: why it cannot be traced.
        quiet: whether to show no progress.

    Raises:
        RequestError: no trial can be made, or one failed.
    """
    why_not = f"the model cannot be traced on tensors without content ({reason})"
    if why := _why_no_trials(request, config):
        raise RequestError(f"{why_not}, and its memory is not known without real steps, {why}")
    bands, sizes, names = [], [], []
    for one in possible(config):
        try:
            points = request.tried.get(one.backend.name) or _points(one, request, quiet=quiet)
        except RequestError as error:
            raise RequestError(f"{why_not}, and a trial of it failed: {error}") from error
        names.append(one.backend.name)
        sizes = sorted(size for size, _ in points)
        bands.append(by_trials(points, config.train.batch_size, on_gpu=request.on_gpu))
    band = any_of(bands)
    compilers = NOTHING if request.on_gpu else compilers_of(names, request.workers)
    worker = {**band.to_json(), "peak_phase": _WHOLE_RUN, "parts": {}, "phases": {_WHOLE_RUN: band.to_json()}}
    return report(
        config,
        request,
        machine=total([times(band, request.sharing), compilers]),
        compilers=compilers,
        workers=[{"rank": rank, **worker} for rank in range(request.workers)],
        method=f"real steps with micro-batches {' and '.join(map(str, sizes))}",
        tried=sizes,
        note=why_not,
    )


def _why_no_trials(request: Request, config: Config) -> str:
    """Why no trial can be made here, as a clause about real steps; empty if one can."""
    if request.quick:
        return "which --quick leaves out"
    if not isinstance(config.launcher, LocalConfig) or request.nodes > 1:
        return "which are taken for runs on this machine alone"
    if request.on_gpu and visible_gpus() < request.workers:
        return "and this machine lacks the GPUs for them"
    return ""


def _points(config: Config, request: Request, *, quiet: bool) -> Points:
    """The trials of the run's micro-batch and of another; both are halved while the larger one does not fit.

    Raises:
        RequestError: a trial was refused, failed or took too long.
    """
    name = TRIED.get(config.backend.name, "the model")
    with Console(stderr=True, quiet=quiet).status(f"trying {name} by real steps ..."), ended_by_signals():
        size = config.train.batch_size
        for left in range(_HALVINGS, -1, -1):
            large = max(2, size)
            try:
                return [_point(config, large, request), _point_beside(config, large, request)]
            except _NoMemoryError:
                if left == 0 or size < 2:
                    raise
                size //= 2
    raise AssertionError("the last round returns or raises")


def _point_beside(config: Config, large: int, request: Request) -> tuple[int, int]:
    """The trial of half of a micro-batch; of twice as much where one sample cannot train, as in batch normalization.

    Raises:
        RequestError: the trial was refused, failed or took too long.
    """
    try:
        return _point(config, large // 2, request)
    except _NoMemoryError:
        raise
    except RequestError:
        if large > 3:
            raise
    return _point(config, 2 * large, request)


class _NoMemoryError(RequestError):
    """A trial needs more memory than is free."""


def _point(config: Config, size: int, request: Request) -> tuple[int, int]:
    """A micro-batch and the bytes of the largest worker in a run of few steps with it.

    Raises:
        RequestError: the trial was refused, failed or took too long.
    """
    limits = Limits(_SECONDS, None if request.on_gpu else int(_SHARE * available()))
    with PrivateFolder("trial") as folder:
        here = LocalConfig(
            workers_per_node=request.workers,
            threads=config.launcher.threads,
            allocator=config.launcher.allocator,
            timeout_seconds=config.launcher.timeout_seconds,
        )
        alone = replace(config, launcher=here, run_root=str(folder / "runs"), tracking=NoTrackingConfig(), trackers={})
        outcome = tried(few_steps(alone, size), limits, folder / "trial", seconds=0)
        figures = Run(Path(outcome.run)).state().figures if outcome.run else {}
    if not outcome.ok:
        lacks = outcome.status == "out of memory"
        raise (_NoMemoryError if lacks else RequestError)(f"micro-batch {size}: {outcome.reason}")
    reserved = int(figures.get(_RESERVED, 0.0) * 2**30)
    return size, reserved if request.on_gpu else outcome.worker_bytes


def few_steps(config: Config, size: int) -> Config:
    """A run of few steps which has all that the memory of the whole one depends on.

    Args:
        config: the configuration of the whole run.
        size: the micro-batch.
    """
    train, backend = config.train, config.backend
    steps = min(train.steps, _STEPS)
    checkpoint, evaluate = train.checkpoint_every, train.eval_every
    if train.steps > _STEPS:
        # The memory of several copies stays. A single one is gone when it is written.
        checkpoint = None if checkpoint is None else {0: steps, 1: steps - 2}.get(train.copied_checkpoints(), 2)
        evaluate = None if evaluate is None else 2 if train.comes_before_end(evaluate) else steps
    if isinstance(backend, OrtConfig):
        first = backend.first_recheck
        compares = first is not None and first <= train.steps
        # The export is a part of a first start's peak, whatever is kept of an earlier one.
        backend = replace(backend, export_cache=False, recheck_every=min(3, steps) if compares else 0)
    trial = short(replace(config, backend=backend, train=replace(train, steady_after=0)), max(2, steps), log_every=1)
    kept = replace(trial.train, eval_every=evaluate, checkpoint_every=checkpoint, save_weights=train.save_weights)
    return replace(trial, train=replace(kept, batch_size=size))
