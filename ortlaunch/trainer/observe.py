"""The second phase of a run: the recorder and the evaluation, and the journal's record of what was built."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.base.secrets import without_secrets
from ortlaunch.metrics.peaks import peak_flops
from ortlaunch.models.items import samples
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import ARTIFACT_FOLDER, Run
from ortlaunch.trainer.build import Parts
from ortlaunch.trainer.checkpoint.resume import Start, leave_behind
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.evaluation import Evaluation
from ortlaunch.trainer.recorder import Recorder


@dataclass(frozen=True)
class Observed:
    """What is trained, with what measures and evaluates it; the journal says where training starts."""

    parts: Parts
    recorder: Recorder
    evaluation: Evaluation | None


def observe(context: RunContext, parts: Parts) -> Observed:
    """Makes the recorder and the evaluation, and journals the start of this attempt."""
    recorder = _recorder(context, parts)
    evaluation = _evaluation(context, parts, recorder)
    leave_behind(parts.start, context.workers, context.control)
    if context.journal is not None:
        _journal_start(context.journal, parts.start, context.run, context.attempt, parts.loader.fingerprint)
        context.system.journal(context.journal, context.run.path, ARTIFACT_FOLDER)
        origin = without_secrets(parts.loader.origin)
        context.journal.dataset(context.config.data.name, parts.loader.fingerprint, origin)
    return Observed(parts, recorder, evaluation)


def _recorder(context: RunContext, parts: Parts) -> Recorder:
    train = context.config.train
    return Recorder(
        train,
        context.workers,
        context.journal,
        context.system,
        is_ort_active=lambda: parts.backend.is_active,
        flops_per_sample=parts.flops_per_sample,
        peak_flops=peak_flops(context.workers.device, train.precision, tf32=train.tf32),
        start_step=parts.start.step,
        tokens_seen=parts.start.tokens,
    )


def _evaluation(context: RunContext, parts: Parts, recorder: Recorder) -> Evaluation | None:
    train = context.config.train
    if train.eval_every is None:
        return None
    held_out = parts.loader.held_out(train.eval_samples)
    items = parts.items or samples
    return Evaluation(held_out, items, train.eval_every, train.steps, context.workers, recorder, parts.backend)


def _journal_start(journal: Journal, start: Start, run: Run, attempt: int, fingerprint: str) -> None:
    """Records the data, and where this attempt starts if it continues a run."""
    tags = {"ortlaunch.data_fingerprint": fingerprint}
    for note in start.notes:
        print(f"warning: {note}", flush=True)
    if attempt:
        tags["ortlaunch.restarts"] = str(attempt)
    if start.path is not None:
        print(f"going on from {start.path}, after step {start.step}", flush=True)
        tags |= {"ortlaunch.resumed_from": str(start.path), "ortlaunch.resumable": "false"}
        if (earlier := start.meta.get("mlflow_run_id")) and start.path.parent != run.checkpoints:
            tags["ortlaunch.resumed_from_run"] = str(earlier)
    journal.tags(tags)
    # Without a checkpoint, a run that is resumed makes the steps again that its journal has.
    if start.path is not None or attempt or run.state().step:
        journal.rewind(start.step, f"goes on from {start.path}" if start.path else "starts from the beginning")
