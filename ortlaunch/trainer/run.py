"""One worker's run, from the configuration to the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ortlaunch.base import own_code
from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import read_json
from ortlaunch.base.secrets import without_secrets
from ortlaunch.config.schema import Config
from ortlaunch.metrics.peaks import peak_flops
from ortlaunch.models.items import samples
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import ARTIFACT_FOLDER, Run
from ortlaunch.run.state import CODE_TAG
from ortlaunch.trainer import memory_error, ranges
from ortlaunch.trainer.best import BestSoFar
from ortlaunch.trainer.build import Built, build
from ortlaunch.trainer.checkpoint.resume import leave_behind
from ortlaunch.trainer.evaluation import Evaluation
from ortlaunch.trainer.feed import Feed, Weights
from ortlaunch.trainer.hooks import Hook, Hooks
from ortlaunch.trainer.loop import train
from ortlaunch.trainer.own_hooks import own_hooks
from ortlaunch.trainer.profile import make_profile
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.session import Session
from ortlaunch.trainer.weights import save_weights
from ortlaunch.trainer.workers import Workers, leave_group, separate_group


def train_run(config: Config, run_dir: Path, workers: Workers, startup: dict[str, float], started: float) -> None:
    """Trains one worker's part of a run, from building it to its results; all workers call it.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        workers: this worker's place.
        startup: start-up times measured so far, by metric name.
        started: when the launcher started the run, in seconds since the epoch.

    Raises:
        RequestError: the request cannot be fulfilled.
        TrainingError: the training failed; a lack of memory comes with figures and advice.
    """
    try:
        session = Session(config, run_dir, workers, started)
        built, hooks, evaluation = begin(session, startup)
        with session.finishing_checkpoints():
            train(session, hooks, evaluation)
        session.finish()
        # Writing may take longer than a step is allowed to.
        with session.watch.paused():
            _write_results(session, built)
        session.watch.stop()
        # The backend's thread pool is left to the end of the process: destroying one that still runs aborts the worker.
        built.backend.close()
        leave_group(workers)
    except Exception as error:
        explanation = memory_error.explained(ranges.explained(error, config), config, run_dir, workers.rank)
        if explanation is error:
            raise
        raise explanation from error


def begin(session: Session, startup: dict[str, float]) -> tuple[Built, Hooks, Evaluation | None]:
    """Builds what is trained and what watches it, and gets the session ready for its first step; all workers call it.

    Args:
        session: this worker's run.
        startup: start-up times measured so far, by metric name.

    Raises:
        RequestError: the request cannot be fulfilled; nothing is journalled then, and no checkpoint is set aside.
    """
    built = build(session, startup)
    recorder = make_recorder(
        session,
        is_ort_active=lambda: built.backend.is_active,
        flops_per_sample=built.flops_per_sample,
        has_values=session.config.train.step is not None,
    )
    hooks = Hooks(_hooks(session, built), recorder.disturbed)
    evaluation = _evaluation(session, built, recorder, hooks)
    leave_behind(session.start, session.workers, session.control)
    if session.journal is not None:
        data, loader = session.config.data, built.loader
        origin = without_secrets(loader.origin)
        journal_start(session, data.name, loader.fingerprint, origin, session.journal, loader.notes)
    session.begin(built, Feed(built.batches, session.workers.device, _weights(session, built)), recorder)
    return built, hooks, evaluation


def make_recorder(
    session: Session, *, is_ort_active: Callable[[], bool], flops_per_sample: float | None, has_values: bool
) -> Recorder:
    """Makes what measures and journals the steps of a session; the last three are as `Recorder` takes them."""
    cfg = session.config.train
    return Recorder(
        cfg,
        session.workers,
        session.journal,
        session.system,
        is_ort_active=is_ort_active,
        flops_per_sample=flops_per_sample,
        peak_flops=peak_flops(session.workers.device, cfg.precision, tf32=cfg.tf32),
        start_step=session.start.step,
        tokens_seen=session.start.tokens,
        has_values=has_values,
    )


def _hooks(session: Session, built: Built) -> list[Hook]:
    profile = make_profile(session.config.profile, session.start.step + 1, session.run.path, session.workers)
    own, session.own = own_hooks(session.config.train.hooks, session, session.start.own.get("hooks", {}))
    return [*([] if profile is None else [profile]), built.backend, *own]


def _evaluation(session: Session, built: Built, recorder: Recorder, hooks: Hooks) -> Evaluation | None:
    cfg = session.config.train
    if cfg.eval_every is None:
        return None
    assert isinstance(cfg.eval_every, int)
    evaluation = Evaluation(
        built.held_out,
        built.items or samples,
        cfg.eval_every,
        cfg.steps,
        session.workers,
        recorder,
        hooks,
        built.scores,
        built.names,
    )
    session.best = BestSoFar(cfg.best, cfg.patience, evaluation.directions, session.start.meta.get("best") or {})
    return evaluation


def _weights(session: Session, built: Built) -> Weights | None:
    if built.items is None:
        return None
    return Weights(built.items, None if session.workers.world_size == 1 else separate_group(session.config))


def journal_start(
    session: Session, data: str, fingerprint: str, origin: str, journal: Journal, notes: Sequence[str] = ()
) -> None:
    """Records the data and the machines, and where this attempt starts if it continues a run.

    Args:
        session: this worker's run.
        data: what the data is called.
        fingerprint: a text by which it is known again.
        origin: where it comes from.
        journal: the run's journal.
        notes: what the data has to say.
    """
    start, run = session.start, session.run
    tags = {"ortlaunch.data_fingerprint": fingerprint, **_code_tags(run)}
    for note in (*start.notes, *notes):
        print(f"warning: {note}", flush=True)
    if session.attempt:
        tags["ortlaunch.restarts"] = str(session.attempt)
    if start.path is not None:
        print(f"going on from {start.path}, after step {start.step}", flush=True)
        tags |= {"ortlaunch.resumed_from": str(start.path), "ortlaunch.resumable": "false"}
        if (earlier := start.meta.get("mlflow_run_id")) and start.path.parent != run.checkpoints:
            tags["ortlaunch.resumed_from_run"] = str(earlier)
    journal.tags(tags)
    # Without a checkpoint, a run that is resumed makes the steps again that its journal has.
    if start.path is not None or session.attempt or run.state().step:
        journal.rewind(start.step, f"goes on from {start.path}" if start.path else "starts from the beginning")
    session.system.journal(journal, run.path, ARTIFACT_FOLDER)
    journal.dataset(data, fingerprint, origin)


def _code_tags(run: Run) -> dict[str, str]:
    """Tags by which the user's own code is known again; says where a run goes on with other code."""
    before, now = read_json(run.code_file) or {}, own_code.digests(own_code.imported())
    if not now:
        return {}
    replace_text(run.code_file, json.dumps(now, indent=2) + "\n")
    tags = {CODE_TAG: own_code.digest(now)}
    if changed := [name for name, digest in now.items() if before.get(name, digest) != digest]:
        tags["ortlaunch.changed_modules"] = ", ".join(changed)
        print(f"note: the run goes on with other code than before: {', '.join(changed)}", flush=True)
    return tags


def _write_results(session: Session, built: Built) -> None:
    """Leaves the weights, and a file that says whether all steps are done or where and why the run stopped."""
    run, journal, cfg = session.run, session.journal, session.config.train
    if journal is not None and session.config.profile is not None and run.profile.is_dir():
        journal.artifact(run.profile)
    if session.stopped_at is None:
        if cfg.save_weights:
            # All workers take part, and the first one gets the weights.
            weights = session.engine.weights()
            if session.workers.is_first:
                save_weights(weights, built.model, run.weights, adapter_only=not session.config.adapter.trains_all)
        if session.workers.is_first:
            run.note_done(session.last_step)
    elif journal is not None:
        # The file STOP says who asked; without the file it was a signal.
        word = run.stop_word()
        session.note_stopped("signal" if word is None else word)
