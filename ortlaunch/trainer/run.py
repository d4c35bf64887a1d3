"""One worker's run, from the configuration to the last step."""

from __future__ import annotations

import os
import time
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import without_secrets
from ortlaunch.config.schema import Config
from ortlaunch.data import build_loader
from ortlaunch.metrics.flops import flops_per_sample
from ortlaunch.metrics.peaks import peak_flops
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.run import checkpoints as store
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import ARTIFACT_FOLDER, Run, Stopped
from ortlaunch.run.state import FIRST_STEP
from ortlaunch.trainer import memory_error
from ortlaunch.trainer.backend_run import backend_run
from ortlaunch.trainer.boundary import Boundary
from ortlaunch.trainer.checkpoint import resume, rng
from ortlaunch.trainer.checkpoint.saver import ENGINE, Saver
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.evaluation import Evaluation
from ortlaunch.trainer.feed import Feed, placed
from ortlaunch.trainer.loop import train
from ortlaunch.trainer.profile import make_profile
from ortlaunch.trainer.recorder import Recorder, since
from ortlaunch.trainer.seeds import make_deterministic, seed_everything
from ortlaunch.trainer.stop import StopRequests
from ortlaunch.trainer.surroundings import Surroundings
from ortlaunch.trainer.watch import Watch
from ortlaunch.trainer.weights import load_weights, save_weights
from ortlaunch.trainer.workers import Workers, leave, separate_group, shorten_timeout
from ortlaunch.trainer.wrapping import wrap


def train_run(config: Config, run_dir: Path, workers: Workers, startup: dict[str, float], started: float) -> None:
    """As `_train_run`; a lack of memory becomes an error with figures and advice."""
    try:
        _train_run(config, run_dir, workers, startup, started)
    except Exception as error:
        explanation = memory_error.explained(error, config, run_dir, workers.rank)
        if explanation is error:
            raise
        raise explanation from error


def _train_run(config: Config, run_dir: Path, workers: Workers, startup: dict[str, float], started: float) -> None:
    """Builds the data and the model, wraps it and trains it.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        workers: this worker's place.
        startup: start-up times measured so far, by metric name; completed and journalled here.
        started: when the launcher started the run, in seconds since the epoch.
    """
    begin = time.perf_counter()
    watch = Watch(
        run_dir,
        workers.rank,
        workers.world_size,
        first_seconds=config.trainer.timeout_seconds,
        seconds=config.launcher.timeout_seconds,
    )
    watch.start()
    journal = Run(run_dir).journal() if workers.is_first else None
    # Apart from each other too: one is used by the thread that writes checkpoints.
    writers, control = separate_group(config), separate_group(config)
    # Of torchrun, and of the scheduler.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ.get("ORTLAUNCH_ATTEMPT", "0"))
    surroundings = Surroundings(workers, control, run_dir)
    start = resume.find(config, run_dir, workers, control, attempt=attempt)
    loader = build_loader(
        config.data,
        batch_size=config.train.batch_size,
        rank=workers.rank,
        world_size=workers.world_size,
        seed=config.seed,
        pin_memory=workers.device.type == "cuda",
        start=start.position,
    )
    if config.train.deterministic:
        make_deterministic()
    if config.train.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    reading = resume.reading_of(config, loader.samples)
    resume.check_data(start, loader.fingerprint, loader.samples, workers, reading)
    # The same weights on every worker, then random numbers of its own for each.
    seed_everything(config.seed)
    model = build_model(config.model)
    shapes = resume.shapes_of(model)
    resume.check_model(start, shapes)
    if config.model.weights is not None and start.path is None:
        load_weights(model, Path(config.model.weights))
    check_vocabulary(model, loader.vocab_size)
    batches = placed(loader)
    seen = [next(batches)]
    first = seen[0].batch
    task = make_task(model, first)
    flops = flops_per_sample(model, task, first) if workers.is_first else None
    engine = wrap(model, config, workers, task, run_dir)
    if start.path is not None:
        engine.warm_up({name: tensor.to(workers.device) for name, tensor in first.items()})
        engine.restore(start.path / ENGINE, start.workers, Run(run_dir).scratch, control)
    startup["startup/build_seconds"] = time.perf_counter() - begin
    backend = backend_run(engine, config, workers, run_dir, journal)
    seen += islice(batches, backend.check_batches)
    startup |= backend.check(task, [one.batch for one in seen])
    # After the check, which draws from the backend's random numbers.
    seed_everything(config.seed + 1 + workers.rank)
    if "rng" in start.own:
        rng.restore(start.own["rng"])
    recorder = Recorder(
        config.train,
        workers,
        journal,
        surroundings,
        is_ort_active=lambda: backend.is_active,
        flops_per_sample=flops,
        peak_flops=peak_flops(workers.device, config.train.precision, tf32=config.train.tf32),
        start_step=start.step,
        tokens_seen=start.tokens,
    )
    if journal is not None:
        _journal_start(journal, start, run_dir, attempt, loader.fingerprint)
        surroundings.journal(journal, run_dir, ARTIFACT_FOLDER)
        journal.dataset(config.data.name, loader.fingerprint, without_secrets(loader.origin))

    def first_step_done() -> None:
        shorten_timeout(config, workers)
        startup[FIRST_STEP] = since(started)
        startup.update(backend.first_step_done())
        recorder.startup(startup)

    evaluation = None
    if config.train.eval_every is not None:
        held_out = loader.held_out(config.train.eval_samples)
        evaluation = Evaluation(held_out, config.train.eval_every, config.train.steps, workers, recorder)
    feed = Feed(chain(seen, batches), workers.device)

    def facts(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {"position": feed.position.as_dict()}
        meta = {
            "step": step,
            "tokens": recorder.tokens_seen,
            "workers": workers.world_size,
            "kind": resume.kind_of(config),
            "seed": config.seed,
            "data": loader.fingerprint,
            "samples": loader.samples,
            "reading": reading,
            "position": feed.position.as_dict(),
            "mlflow_run_id": Run(run_dir).mlflow_run_id(),
            "time": time.time(),
            "shapes": shapes,
        }
        return own, meta

    stop = StopRequests(run_dir, control, is_first=workers.is_first, grace_seconds=config.launcher.grace_seconds)
    saver = Saver(store.Store(Run(run_dir).checkpoints, config.train.keep_checkpoints), workers, writers)
    boundary = Boundary(config.train, engine, saver, stop, watch, recorder, journal, facts)
    stop.listen()
    surroundings.sampler.start()
    train(
        engine,
        feed,
        config.train,
        workers.device,
        recorder,
        boundary,
        first_step_done,
        evaluation,
        start_step=start.step,
        profile=make_profile(config.profile, start.step + 1, run_dir, workers),
    )
    surroundings.sampler.stop()
    boundary.finish()
    loader.close()
    watch.through(lambda: _leave(config, run_dir, model, engine, boundary, journal))
    watch.stop()
    # ONNX Runtime's threads: left to the process' end, one that is destroyed while it runs would abort the worker.
    backend.close()
    leave(workers)


def check_vocabulary(model: torch.nn.Module, vocab_size: int | None) -> None:
    """Refuses data whose token ids the model has no embedding for.

    Raises:
        RequestError: with both sizes.
    """
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is not None and isinstance(known, int) and vocab_size > known:
        raise RequestError(
            f"the data has {vocab_size} token ids and the model knows {known}: set model.params.vocab_size={vocab_size}"
        )


def _journal_start(journal: Journal, start: resume.Start, run_dir: Path, attempt: int, fingerprint: str) -> None:
    """Records the data, and where this attempt begins if it is not at the beginning of a run."""
    tags = {"ortlaunch.data_fingerprint": fingerprint}
    for note in start.notes:
        print(f"warning: {note}", flush=True)
    if attempt:
        tags["ortlaunch.restarts"] = str(attempt)
    if start.path is not None:
        print(f"going on from {start.path}, after step {start.step}", flush=True)
        tags |= {"ortlaunch.resumed_from": str(start.path), "ortlaunch.resumable": "false"}
        if (earlier := start.meta.get("mlflow_run_id")) and start.path.parent != Run(run_dir).checkpoints:
            tags["ortlaunch.resumed_from_run"] = str(earlier)
    journal.tags(tags)
    if start.path is not None or attempt:
        journal.rewind(start.step, f"goes on from {start.path}" if start.path else "begins anew")


def _leave(
    config: Config, run_dir: Path, model: torch.nn.Module, engine: Engine, boundary: Boundary, journal: Journal | None
) -> None:
    """What a run leaves behind: what was seen of its steps, its weights, or where it stopped."""
    run = Run(run_dir)
    if journal is not None and config.profile is not None and run.profile.is_dir():
        journal.artifact(run.profile)
    if boundary.stopped_at is None:
        if config.train.save_weights:
            weights = engine.weights()
            if journal is not None:
                save_weights(weights, model, run.weights)
        if journal is not None:
            # Whoever would start the run again looks for it.
            run.note_done(config.train.steps)
    elif journal is not None:
        checkpoint = run.checkpoints / store.name_of(boundary.stopped_at)
        word = run.stop_word()
        # The file says whose will it is; without one it was a signal.
        run.note_stopped(Stopped(boundary.stopped_at, str(checkpoint), "signal" if word is None else word))
        journal.tags({"ortlaunch.resumable": "true", "ortlaunch.stopped_at_step": str(boundary.stopped_at)})
