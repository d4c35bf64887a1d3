"""The first phase of a run: from the configuration to everything that training needs.

Each step takes what the step before it returned, so the types fix their order:

find -> Start -> open_data -> Data -> build_model -> Built -> wrap_model -> Wrapped -> restore -> Restored
-> check_backend -> Checked -> seed_training -> Parts
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import cloned, moved
from ortlaunch.data.loader import Loader
from ortlaunch.models.checks import check_precision
from ortlaunch.models.items import Items
from ortlaunch.models.task import Task, make_task
from ortlaunch.trainer.backend_run import BackendRun, backend_run
from ortlaunch.trainer.buffers import plain_buffers, take_first_workers
from ortlaunch.trainer.checkpoint import resume, rng
from ortlaunch.trainer.checkpoint.own_buffers import OwnBuffers
from ortlaunch.trainer.checkpoint.saver import ENGINE
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.counting import counted_items
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.feed import Lookahead
from ortlaunch.trainer.prepare import (
    build_seeded,
    check_ids,
    check_shares,
    check_vocabulary,
    counted_flops,
    open_loader,
)
from ortlaunch.trainer.ranges import Ranges
from ortlaunch.trainer.seeds import make_deterministic, seed_everything
from ortlaunch.trainer.state_memory import check_state
from ortlaunch.trainer.weights import load_weights
from ortlaunch.trainer.wrapping import wrap


@dataclass(frozen=True)
class Data:
    """The run's data, at the position of the checkpoint and checked to be the data of the checkpoint."""

    start: resume.Start
    loader: Loader
    reading: dict[str, Any]
    """The keys that a position in a stream depends on; see `resume.reading_of`."""


@dataclass(frozen=True)
class Built:
    """The plain model with the run's initial weights, checked against the checkpoint and the data."""

    data: Data
    model: torch.nn.Module
    shapes: dict[str, list[int]]
    """Shape of each parameter and buffer, by name."""
    buffers: OwnBuffers


@dataclass(frozen=True)
class Wrapped:
    """The model inside its backend and its trainer."""

    built: Built
    engine: Engine
    task: Task
    items: Items | None
    """What a loss is a mean over; None where all micro-batches have as many."""
    batches: Lookahead
    flops_per_sample: float | None
    """Of forward and backward; None if it is not known."""


@dataclass(frozen=True)
class Restored:
    """The engine in the state from which training continues."""

    wrapped: Wrapped
    startup: dict[str, float]
    """Start-up times so far, by metric name."""


@dataclass(frozen=True)
class Checked:
    """The engine after the backend's check has passed, which may have drawn random numbers."""

    wrapped: Wrapped
    backend: BackendRun
    startup: dict[str, float]


@dataclass(frozen=True)
class Parts:
    """Everything that training needs; the random number generators are in the state of the first step."""

    start: resume.Start
    loader: Loader
    reading: dict[str, Any]
    batches: Lookahead
    model: torch.nn.Module
    shapes: dict[str, list[int]]
    buffers: OwnBuffers
    items: Items | None
    flops_per_sample: float | None
    engine: Engine
    backend: BackendRun
    startup: dict[str, float]


def build(context: RunContext, startup: dict[str, float]) -> Parts:
    """Builds what this worker trains with; all workers call it.

    Args:
        context: this worker's view of the run.
        startup: start-up times measured so far, by metric name.

    Raises:
        RequestError: for data, a model, a checkpoint or a backend that cannot be used for this run.
    """
    start = resume.find(context.config, context.run.path, context.workers, context.control, attempt=context.restarts)
    data = open_data(context, start)
    built = build_model(context, data)
    check_state(context, built.model)
    wrapped = wrap_model(context, built)
    restored = restore(context, wrapped, startup)
    checked = check_backend(context, restored)
    return seed_training(context, checked)


def open_data(context: RunContext, start: resume.Start) -> Data:
    """Opens the data at the position where training continues."""
    loader = open_loader(context.config, context.workers, start=start.position)
    reading = resume.reading_of(context.config, is_numbered=loader.is_numbered)
    resume.check_data(start, loader.fingerprint, loader.samples, context.workers, reading)
    # Before the model is built: the loader's processes would keep a copy of its first weights.
    loader.start_processes()
    check_shares(loader, context.control)
    return Data(start, loader, reading)


def build_model(context: RunContext, data: Data) -> Built:
    """Builds the model, with the same weights on every worker; those of a checkpoint come with `restore`."""
    config, start = context.config, data.start
    _set_arithmetic(deterministic=config.train.deterministic, tf32=config.train.tf32)
    model = build_seeded(config)
    check_precision(model)
    shapes = resume.shapes_of(model)
    resume.check_model(start, shapes)
    buffers = OwnBuffers(model, shapes)
    resume.check_buffers(start, buffers.shapes)
    if config.model.weights is not None and start.path is None:
        load_weights(model, Path(config.model.weights))
    check_vocabulary(model, data.loader.vocab_size)
    return Built(data, model, shapes, buffers)


def wrap_model(context: RunContext, built: Built) -> Wrapped:
    """Wraps the model after reading the first batch, which shows how the plain model is called."""
    batches = Lookahead(built.data.loader)
    (first,) = batches.peek(1)
    check_ids(built.model, first)
    task = make_task(built.model, first)
    # A copy, since a forward may change its inputs in place, and the batch is trained on later.
    counted = cloned(first)
    ranges = Ranges(counted)
    try:
        with ranges:
            flops = counted_flops(context.config, built.model, task, counted)
    except RequestError:
        # The data may say how many ids or classes there are, which makes a better message.
        ranges.check(context.config, built.data.loader)
        raise
    ranges.check(context.config, built.data.loader)
    items = counted_items(context, built.model, task, batches, labels_vary=built.data.loader.labels_vary)
    engine = wrap(built.model, context.config, context.workers, task, context.run.path)
    return Wrapped(built, engine, task, items, batches, flops)


def restore(context: RunContext, wrapped: Wrapped, startup: dict[str, float]) -> Restored:
    """Loads the engine's state from the checkpoint, if the run starts from one."""
    start, engine, built = wrapped.built.data.start, wrapped.engine, wrapped.built
    if start.path is not None:
        (first,) = wrapped.batches.peek(1)
        # A copy, since a forward may change its inputs in place, and the batch is trained on later.
        with built.buffers.kept():
            engine.warm_up(moved(first, context.workers.device, copy=True))
        engine.restore(start.path / ENGINE, start.workers, context.run.scratch, context.control)
        built.buffers.load(start.buffers)
        if start.workers != context.workers.world_size > 1:
            # DeepSpeed may have given each worker those of the worker that it reads from.
            take_first_workers(plain_buffers(built.model).values())
    return Restored(wrapped, {**startup, "startup/build_seconds": time.perf_counter() - context.entered})


def check_backend(context: RunContext, restored: Restored) -> Checked:
    """Compares the backend with PyTorch on the first batches, which training gets again."""
    wrapped = restored.wrapped
    backend = backend_run(wrapped.engine, context.config, context.workers, context.run.path, context.journal)
    batches = wrapped.batches.peek(1 + backend.check_batches)
    seconds = backend.check(wrapped.task, batches)
    return Checked(wrapped, backend, restored.startup | seconds)


def seed_training(context: RunContext, checked: Checked) -> Parts:
    """Seeds the random number generators: each worker's own, or in the state that the checkpoint has for it."""
    wrapped = checked.wrapped
    built, data = wrapped.built, wrapped.built.data
    seed_everything(context.config.seed + 1 + context.workers.rank)
    if "rng" in data.start.own:
        rng.restore(data.start.own["rng"])
    return Parts(
        start=data.start,
        loader=data.loader,
        reading=data.reading,
        batches=wrapped.batches,
        model=built.model,
        shapes=built.shapes,
        buffers=built.buffers,
        items=wrapped.items,
        flops_per_sample=wrapped.flops_per_sample,
        engine=wrapped.engine,
        backend=checked.backend,
        startup=checked.startup,
    )


def _set_arithmetic(*, deterministic: bool, tf32: bool) -> None:
    """Sets torch's switches for the whole process."""
    if deterministic:
        make_deterministic()
    if tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
