"""One worker's run, from the configuration to the last step."""

from __future__ import annotations

import time
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist

from ortlaunch.config.schema import Config
from ortlaunch.data import build_loader
from ortlaunch.errors import RequestError
from ortlaunch.metrics.flops import flops_per_sample, peak_flops
from ortlaunch.registry import build_model
from ortlaunch.tracking.journal import Journal
from ortlaunch.trainer.backend_run import backend_run
from ortlaunch.trainer.loop import train
from ortlaunch.trainer.recorder import Recorder, since
from ortlaunch.trainer.seeds import seed_everything
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
    # The same weights on every worker, then random numbers of its own for each.
    seed_everything(config.seed)
    model = build_model(config.model)
    check_vocabulary(model, loader.vocab_size)
    batches = iter(loader)
    first = next(batches)
    task = make_task(model, first)
    flops = flops_per_sample(model, task, first) if workers.is_first else None
    engine = wrap(model, config, workers, task, run_dir)
    startup["startup/build_seconds"] = time.perf_counter() - begin
    backend = backend_run(engine, config, workers, run_dir, journal)
    seen = [first, *islice(batches, backend.check_batches)]
    startup |= backend.check(task, seen)
    # After the check, which draws from the backend's random numbers.
    seed_everything(config.seed + 1 + workers.rank)
    recorder = Recorder(
        config.train,
        workers,
        journal,
        is_ort_active=lambda: backend.is_active,
        flops_per_sample=flops,
        peak_flops=peak_flops(workers.device, config.train.precision),
    )
    if journal is not None:
        journal.tags({"ortlaunch.data_fingerprint": loader.fingerprint})

    def first_step_done() -> None:
        startup["startup/time_to_first_step_seconds"] = since(started)
        startup.update(backend.first_step_done())
        recorder.startup(startup)

    train(engine, chain(seen, batches), config.train, workers.device, recorder, first_step_done)
    loader.close()
    # In order, ONNX Runtime's threads and then the process group's: left to the interpreter's end, one that is
    # destroyed while it runs would abort the worker.
    backend.close()
    dist.destroy_process_group()


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
