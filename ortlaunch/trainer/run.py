"""One worker's run, from the configuration to the last step."""

from __future__ import annotations

import time
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist

from ortlaunch.config.schema import Allow, Config, OrtConfig
from ortlaunch.data import build_loader
from ortlaunch.errors import RequestError
from ortlaunch.metrics.flops import flops_per_sample, peak_flops
from ortlaunch.registry import build_model
from ortlaunch.tracking.journal import Journal
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.loop import train
from ortlaunch.trainer.recorder import Recorder, since
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.task import Batch, Task, make_task
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
    seen = [first]
    if isinstance(config.backend, OrtConfig):
        from ortlaunch.ort.check.quick import FRESH_BATCHES

        seen += islice(batches, FRESH_BATCHES)
        startup["startup/ort_check_seconds"] = check_ort(engine, config.backend, workers, task, seen, journal)
    # After the check, which draws from ONNX Runtime's random numbers.
    seed_everything(config.seed + 1 + workers.rank)
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

    train(engine, chain(seen, batches), config.train, workers.device, recorder, first_step_done)
    loader.close()
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


def check_ort(
    engine: Engine, cfg: OrtConfig, workers: Workers, task: Task, batches: list[Batch], journal: Journal | None
) -> float:
    """Stops a run whose model would compute something else under ONNX Runtime, unless ``backend.allow`` names it.

    Args:
        engine: the wrapped model, before its first step.
        cfg: the backend's configuration.
        workers: this worker's place.
        task: how the model is called.
        batches: the run's first batches; it gets them again for training.
        journal: takes what was found and allowed, as a tag.

    Returns:
        Seconds that the slowest worker took, without the export that the first step would have made.

    Raises:
        RequestError: with what was found and what to do.
    """
    from ortlaunch.ort import session
    from ortlaunch.ort.check.quick import QuickCheck

    begin = time.perf_counter()
    here = [{name: tensor.to(workers.device) for name, tensor in batch.items()} for batch in batches]
    found = QuickCheck(engine.inner, task, engine.precision_context).findings(here)
    for finding in found:
        if finding.kind not in cfg.allow:
            raise RequestError(finding.refusal())
    seconds = time.perf_counter() - begin - (session.export_seconds(engine.inner) or 0.0)
    kinds = {finding.kind for finding in found}
    everyone = workers.gather([seconds, *(float(kind in kinds) for kind in Allow)])
    allowed = [kind.value for kind, seen in zip(Allow, everyone[:, 1:].amax(dim=0).tolist(), strict=True) if seen]
    if journal is not None and allowed:
        journal.tags({"ortlaunch.allowed": ",".join(allowed)})
    return float(everyone[:, 0].max())


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


def _warn_of_fallback(engine: Engine, config: Config, workers: Workers, journal: Journal | None) -> None:
    """Says loudly that a run that asked for ONNX Runtime goes on without it (``backend.fallback=warn``)."""
    if not isinstance(config.backend, OrtConfig) or ort_is_active(engine, config):
        return
    from ortlaunch.ort import session

    reason = session.fallback_reason(engine.inner) or "unknown reason"
    if journal is not None:
        journal.tags({"ortlaunch.fallback_reason": reason})
        print(f"warning: ONNX Runtime is NOT active, plain PyTorch runs instead (backend.fallback=warn): {reason}")
