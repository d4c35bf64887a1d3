"""Builds what a run trains: data, model, backend and trainer, in the state of the first step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config
from ortlaunch.config.scores import wanted
from ortlaunch.data.batch import cloned, moved
from ortlaunch.data.holdout import HeldOut
from ortlaunch.data.loader import Loader
from ortlaunch.data.sources.chat import ChatConfig
from ortlaunch.models.apart import check_apart
from ortlaunch.models.checks import check_precision
from ortlaunch.models.items import Items
from ortlaunch.models.lora import base_digest
from ortlaunch.models.task import Task
from ortlaunch.trainer.backend_run import BackendRun, backend_run
from ortlaunch.trainer.buffers import plain_buffers, take_first_workers
from ortlaunch.trainer.checkpoint import resume, rng
from ortlaunch.trainer.checkpoint.own_buffers import OwnBuffers
from ortlaunch.trainer.checkpoint.saver import ENGINE
from ortlaunch.trainer.counting import counted_items
from ortlaunch.trainer.duration import in_steps
from ortlaunch.trainer.evaluation import first_result, no_scores, scores_of
from ortlaunch.trainer.feed import Lookahead
from ortlaunch.trainer.prepare import (
    build_seeded,
    check_ids,
    check_shares,
    check_vocabulary,
    counted_flops,
    open_loader,
    task_of,
)
from ortlaunch.trainer.ranges import Ranges
from ortlaunch.trainer.scores import Scores
from ortlaunch.trainer.seeds import make_deterministic, seed_everything
from ortlaunch.trainer.session import Session
from ortlaunch.trainer.state_memory import check_state
from ortlaunch.trainer.weights import load_weights
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap


@dataclass(frozen=True)
class Built:
    """What a run trains, beside the engine; the random number generators are in the state of the first step."""

    loader: Loader
    batches: Lookahead
    model: torch.nn.Module
    """The plain model."""
    buffers: OwnBuffers
    shapes: dict[str, list[int]]
    """Shape of each parameter and buffer, by name."""
    base: str
    """A hash of the weights that no checkpoint holds; empty where all weights are trained."""
    reading: dict[str, Any]
    """The keys that a position in a stream depends on; see `resume.reading_of`."""
    items: Items | None
    """What a loss is a mean over; None where all micro-batches have as many."""
    flops_per_sample: float | None
    """Of forward and backward; None if it is not known."""
    held_out: list[HeldOut]
    """This worker's batches of an evaluation; empty without evaluations."""
    scores: Scores
    names: list[str]
    """The further numbers of an evaluation; see `Evaluation`."""
    backend: BackendRun
    startup: dict[str, float]
    """Start-up times so far, by metric name."""


def build(session: Session, startup: dict[str, float]) -> Built:
    """Builds what this worker trains with, and sets the session's engine; all workers call it.

    Args:
        session: this worker's run.
        startup: start-up times measured so far, by metric name.

    Raises:
        RequestError: for data, a model, a checkpoint or a backend that cannot be used for this run.
    """
    workers = session.workers
    session.find_checkpoint()
    loader, reading = open_data(session)
    batches = Lookahead(loader)
    session.set_duration(in_steps(session.config, loader, batches.peek(1)[0], workers))
    config = session.config
    model, shapes, buffers = build_model(session, loader)
    base = "" if config.adapter.trains_all else base_digest(model)
    resume.check_base(session.start, base)
    check_state(session, model)
    task, flops = first_forward(session, model, loader, batches)
    held_out = [] if config.train.eval_every is None else loader.held_out(config.train.eval_samples)
    scores, names = _scores(config, workers, model, task, held_out, loader.metrics)
    with task.kept():
        items = counted_items(session, model, task, batches, labels_vary=loader.labels_vary)
    session.engine = wrap(model, config, workers, task, session.run.path)
    if session.start.path is not None:
        _restore(session, session.start.path, model, buffers, batches)
    startup = {**startup, "startup/build_seconds": time.perf_counter() - session.entered}
    # The backend is compared with PyTorch on the first batches, which training gets again.
    backend = backend_run(session.engine, config, workers, session.run.path, session.journal)
    with task.kept():
        startup |= backend.check(task, batches.peek(1 + backend.check_batches))
    # What was drawn until here does not reach the training: each worker has its own seed, or goes on from its state.
    seed_everything(config.seed + 1 + workers.rank)
    if "rng" in session.start.own:
        rng.restore(session.start.own["rng"])
    task.load_state(session.start.own.get("step", {}))
    return Built(
        loader, batches, model, buffers, shapes, base, reading, items, flops, held_out, scores, names, backend, startup
    )


def open_data(session: Session) -> tuple[Loader, dict[str, Any]]:
    """Opens the data at the position of the checkpoint; with it comes what `resume.reading_of` returns."""
    start = session.start
    loader = open_loader(session.config, session.workers, start=start.position)
    reading = resume.reading_of(session.config, is_numbered=loader.is_numbered)
    resume.check_data(start, loader.fingerprint, loader.samples, session.workers, reading)
    # Before the model is built: the loader's processes would keep a copy of its first weights.
    loader.start_processes()
    check_shares(loader, session.control)
    return loader, reading


def build_model(session: Session, loader: Loader) -> tuple[torch.nn.Module, dict[str, list[int]], OwnBuffers]:
    """Builds the model, with the same weights on every worker; those of a checkpoint come when it is wrapped.

    Returns:
        The plain model, the shapes of its parameters and buffers, and the buffers as they were built.
    """
    config, start = session.config, session.start
    _set_arithmetic(deterministic=config.train.deterministic, tf32=config.train.tf32)
    model = build_seeded(config)
    check_precision(model)
    shapes = resume.shapes_of(model)
    resume.check_model(start, shapes)
    buffers = OwnBuffers(model, shapes)
    resume.check_buffers(start, buffers.shapes)
    if config.model.weights is not None and start.path is None and config.adapter.trains_all:
        load_weights(model, Path(config.model.weights))
    check_vocabulary(model, loader.vocab_size)
    return model, shapes, buffers


def first_forward(
    session: Session, model: torch.nn.Module, loader: Loader, batches: Lookahead
) -> tuple[Task, float | None]:
    """Calls the plain model with the first batch, which stays the next one.

    Returns:
        How the model is called, and the operations of forward and backward for a sample; None if they are not known.
    """
    (first,) = batches.peek(1)
    check_ids(model, first)
    task = task_of(session.config, model, first)
    # A copy, since a forward may change its inputs in place, and the batch is trained on later.
    counted = cloned(first)
    ranges = Ranges(counted)
    try:
        with ranges, task.kept():
            flops = counted_flops(session.config, model, task, counted)
    except RequestError:
        # The data may say how many ids or classes there are, which makes a better message.
        ranges.check(session.config, loader)
        raise
    ranges.check(session.config, loader)
    if isinstance(session.config.data, ChatConfig) and session.config.data.packing:
        check_apart(model, task, first)
    return task, flops


def _scores(
    config: Config,
    workers: Workers,
    model: torch.nn.Module,
    task: Task,
    held_out: list[HeldOut],
    usual: tuple[str, ...],
) -> tuple[Scores, list[str]]:
    """The metrics, tried with a held-out batch, and the names of the further numbers of an evaluation.

    Those that are `usual` for the data are computed where torchmetrics is installed.
    """
    has_own = config.eval.step or config.train.step
    metrics = config.eval.metrics or ([] if has_own or find_spec("torchmetrics") is None else list(usual))
    if not held_out or not (metrics or has_own):
        return no_scores()
    first = first_result(model, task, held_out[0].batch)
    return scores_of(wanted(metrics), first, workers, of_model=config.eval.step is None)


def _restore(session: Session, path: Path, model: torch.nn.Module, buffers: OwnBuffers, batches: Lookahead) -> None:
    """Loads the engine's state and the buffers from the checkpoint."""
    engine, workers, start = session.engine, session.workers, session.start
    (first,) = batches.peek(1)
    # A copy, since a forward may change its inputs in place, and the batch is trained on later.
    with buffers.kept():
        engine.warm_up(moved(first, workers.device, copy=True))
    engine.restore(path / ENGINE, start.workers, session.run.scratch, session.control)
    buffers.load(start.buffers)
    if start.workers != workers.world_size > 1:
        # DeepSpeed may have given each worker those of the worker that it reads from.
        take_first_workers(plain_buffers(model).values())


def _set_arithmetic(*, deterministic: bool, tf32: bool) -> None:
    """Sets torch's switches for the whole process."""
    if deterministic:
        make_deterministic()
    if tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
