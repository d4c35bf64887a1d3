"""The third phase of a run: the training loop with its checkpoints, its requests to stop and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ortlaunch.run import checkpoints as store
from ortlaunch.run.state import FIRST_STEP
from ortlaunch.trainer.build import Parts
from ortlaunch.trainer.checkpoint.saver import Saver
from ortlaunch.trainer.checkpoint_facts import CheckpointFacts
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.feed import Feed, Weights
from ortlaunch.trainer.loop import run_steps
from ortlaunch.trainer.observe import Observed
from ortlaunch.trainer.profile import make_profile
from ortlaunch.trainer.recorder import Recorder, seconds_since
from ortlaunch.trainer.step_end import StepEnd
from ortlaunch.trainer.stop import StopRequests
from ortlaunch.trainer.workers import separate_group, set_time_limits


@dataclass(frozen=True)
class Trained:
    """The parts after the last step; no loader process, sampler or checkpoint thread works any more."""

    parts: Parts
    stopped_at: int | None
    """The step at which a request to stop ended the training; None if all steps are done."""
    recorder: Recorder


def train(context: RunContext, observed: Observed) -> Trained:
    """Takes all steps, or those until the run is asked to stop; all workers call it.

    Raises:
        TrainingError: a loss or a gradient is not finite, or the checkpoint of a stopped run cannot be written.
    """
    parts, recorder = observed.parts, observed.recorder
    feed = Feed(parts.batches, context.workers.device, _weights(context, parts))
    stop = StopRequests(
        context.run.path,
        context.control,
        is_first=context.workers.is_first,
        grace_seconds=context.config.launcher.grace_seconds,
    )
    step_end = _step_end(context, observed, feed, stop)
    stop.listen()
    context.system.sampler.start()
    try:
        run_steps(
            parts.engine,
            feed,
            context.config.train,
            context.workers.device,
            recorder,
            step_end,
            partial(_first_step_done, context, parts, recorder),
            observed.evaluation,
            start_step=parts.start.step,
            profile=make_profile(context.config.profile, parts.start.step + 1, context.run.path, context.workers),
            backend=parts.backend,
        )
    except BaseException:
        step_end.give_up(context.config.launcher.grace_seconds)
        raise
    context.system.sampler.stop()
    step_end.finish()
    parts.loader.close()
    return Trained(parts, step_end.stopped_at, recorder)


def _weights(context: RunContext, parts: Parts) -> Weights | None:
    if parts.items is None:
        return None
    alone = context.workers.world_size == 1
    return Weights(parts.items, None if alone else separate_group(context.config))


def _step_end(context: RunContext, observed: Observed, feed: Feed, stop: StopRequests) -> StepEnd:
    train = context.config.train
    parts = observed.parts
    saver = Saver(
        store.Store(context.run.checkpoints, train.keep_checkpoints),
        context.workers,
        context.writers,
        parts.buffers,
        sends_buffers=parts.engine.sends_buffers,
    )
    return StepEnd(
        train,
        parts.engine,
        saver,
        stop,
        context.watch,
        observed.recorder,
        context.journal,
        CheckpointFacts(context, observed, feed),
    )


def _first_step_done(context: RunContext, parts: Parts, recorder: Recorder) -> None:
    """Journals the start-up times: the first step, with export and compilation, is a part of the start."""
    set_time_limits(context.config, context.workers)
    startup = {**parts.startup, FIRST_STEP: seconds_since(context.launched)}
    recorder.startup(startup | parts.backend.first_step_done())
