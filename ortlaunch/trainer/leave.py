"""The last phase of a run: what it leaves in its folder, and the end of its threads."""

from __future__ import annotations

from ortlaunch.run import checkpoints as store
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run, Stopped
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.train import Trained
from ortlaunch.trainer.weights import save_weights
from ortlaunch.trainer.workers import leave_group


def leave(context: RunContext, trained: Trained) -> None:
    """Writes the results, then ends what is still running; all workers call it."""
    # Writing may take longer than a step is allowed to.
    with context.watch.paused():
        _write_results(context, trained)
    context.watch.stop()
    # The backend's thread pool is left to the end of the process: destroying one that still runs aborts the worker.
    trained.parts.backend.close()
    leave_group(context.workers)


def _write_results(context: RunContext, trained: Trained) -> None:
    journal, profile = context.journal, context.run.profile
    if journal is not None and context.config.profile is not None and profile.is_dir():
        journal.artifact(profile)
    if trained.stopped_at is None:
        _write_done(context, trained)
    elif journal is not None:
        _write_stopped(context.run, journal, trained.stopped_at)


def _write_done(context: RunContext, trained: Trained) -> None:
    """Leaves the weights, and a file that tells `ortlaunch resume` that all steps are done."""
    train, parts = context.config.train, trained.parts
    if train.save_weights:
        # All workers take part, and the first one gets the weights.
        weights = parts.engine.weights()
        if context.workers.is_first:
            save_weights(weights, parts.model, context.run.weights)
    if context.workers.is_first:
        context.run.note_done(train.steps)


def _write_stopped(run: Run, journal: Journal, step: int) -> None:
    """Leaves a file that says where and why the run stopped, and removes the request to stop."""
    # The file STOP says who asked; without the file it was a signal.
    word = run.stop_word()
    reason = "signal" if word is None else word
    checkpoint = run.checkpoints / store.name_of(step)
    run.note_stopped(Stopped(step, str(checkpoint), reason))
    journal.tags({"ortlaunch.resumable": "true", "ortlaunch.stopped_at_step": str(step)})
