"""One worker's run, from the configuration to the last step."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from ortlaunch.config.schema import Config, OrtConfig
from ortlaunch.data import build_loader
from ortlaunch.errors import RequestError
from ortlaunch.metrics.flops import flops_per_sample, peak_flops
from ortlaunch.registry import build_model
from ortlaunch.tracking.journal import Journal
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.evaluation import Evaluation
from ortlaunch.trainer.feed import Feed
from ortlaunch.trainer.loop import train
from ortlaunch.trainer.recorder import Recorder, since
from ortlaunch.trainer.seeds import make_deterministic, seed_everything
from ortlaunch.trainer.task import make_task
from ortlaunch.trainer.workers import Workers
from ortlaunch.wrapping import wrap


def train_run(config: Config, run_dir: Path, workers: Workers, startup: dict[str, float], started: float) -> None:
    """Builds the data and the model, wraps it and trains it.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        workers: this worker's place.
        startup: start-up times measured so far, by metric name; completed and journalled here.
        started: when the launcher started the run, in seconds since the epoch.
    """
    begin = time.perf_counter()
    journal = Journal(run_dir / "journal.jsonl") if workers.is_first else None
    loader = build_loader(
        config.data,
        batch_size=config.train.batch_size,
        rank=workers.rank,
        world_size=workers.world_size,
        seed=config.seed,
        pin_memory=workers.device.type == "cuda",
    )
    if config.train.deterministic:
        make_deterministic()
    if config.train.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    # The same weights on every worker, then random numbers of its own for each.
    seed_everything(config.seed)
    model = build_model(config.model)
    check_vocabulary(model, loader.vocab_size)
    batches = iter(loader)
    first = next(batches)
    task = make_task(model, first)
    flops = flops_per_sample(model, task, first) if workers.is_first else None
    engine = wrap(model, config, workers, task, run_dir)
    seed_everything(config.seed + 1 + workers.rank)
    startup["startup/build_seconds"] = time.perf_counter() - begin
    recorder = Recorder(
        config.train,
        workers,
        journal,
        is_ort_active=lambda: ort_is_active(engine, config),
        flops_per_sample=flops,
        peak_flops=peak_flops(workers.device, config.train.precision),
    )
    if journal is not None:
        journal.tags({"ortlaunch.data_fingerprint": loader.fingerprint})

    def first_step_done() -> None:
        startup["startup/time_to_first_step_seconds"] = since(started)
        startup.update(_export_seconds(engine, config))
        recorder.startup(startup)
        _warn_of_fallback(engine, config, workers, journal)
        if journal is not None:
            _keep_graphs(config, run_dir, journal)

    evaluation = None
    if config.train.eval_every is not None:
        held_out = loader.held_out(config.train.eval_samples)
        evaluation = Evaluation(held_out, config.train.eval_every, config.train.steps, workers, recorder)
    feed = Feed(chain([first], batches), workers.device, lambda: loader.position)
    train(engine, feed, config.train, workers.device, recorder, first_step_done, evaluation)
    loader.close()
    _close(engine, config)


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


def ort_is_active(engine: Engine, config: Config) -> bool:
    """Whether ONNX Runtime really ran this worker's last training step."""
    if not isinstance(config.backend, OrtConfig):
        return False
    from ortlaunch.ort import session

    return session.is_active(engine.inner)


def _export_seconds(engine: Engine, config: Config) -> dict[str, float]:
    if not isinstance(config.backend, OrtConfig):
        return {}
    from ortlaunch.ort import session

    seconds = session.export_seconds(engine.inner)
    return {} if seconds is None else {"startup/ort_export_seconds": seconds}


def _keep_graphs(config: Config, run_dir: Path, journal: Journal) -> None:
    """Has the graphs that ``backend.debug.save_onnx`` left in the run folder kept with the run."""
    if isinstance(config.backend, OrtConfig) and config.backend.debug.save_onnx:
        journal.artifact(run_dir / "onnx")


def _close(engine: Engine, config: Config) -> None:
    """Ends threads in order, ONNX Runtime's and then the process group's: left to the interpreter's end, one that is
    destroyed while it runs would abort the worker."""
    if isinstance(config.backend, OrtConfig):
        from ortlaunch.ort import session

        session.close(engine.inner)
    dist.destroy_process_group()


def _warn_of_fallback(engine: Engine, config: Config, workers: Workers, journal: Journal | None) -> None:
    """Says loudly that a run that asked for ONNX Runtime goes on without it (``backend.fallback=warn``)."""
    if not isinstance(config.backend, OrtConfig) or ort_is_active(engine, config):
        return
    from ortlaunch.ort import session

    reason = session.fallback_reason(engine.inner) or "unknown reason"
    if journal is not None:
        journal.tags({"ortlaunch.fallback_reason": reason})
        print(f"warning: ONNX Runtime is NOT active, plain PyTorch runs instead (backend.fallback=warn): {reason}")
