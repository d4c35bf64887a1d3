"""The training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ortlaunch.config.schema import TrainConfig
from ortlaunch.trainer.backend_run import BackendRun
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.evaluation import Evaluation
from ortlaunch.trainer.feed import Feed
from ortlaunch.trainer.garbage import collected_every
from ortlaunch.trainer.profile import Profile
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.step_end import StepEnd

_NOTHING = contextlib.nullcontext()


def run_steps(
    engine: Engine,
    feed: Feed,
    cfg: TrainConfig,
    device: torch.device,
    recorder: Recorder,
    step_end: StepEnd,
    first_step_done: Callable[[], None],
    evaluation: Evaluation | None = None,
    start_step: int = 0,
    profile: Profile | None = None,
    backend: BackendRun | None = None,
) -> None:
    """Takes optimizer steps until ``cfg.steps`` are done or the run is asked to stop.

    Args:
        engine: the wrapped model.
        feed: endless micro-batches of this worker.
        cfg: how long, and how many micro-batches to a step.
        device: where losses are.
        recorder: counts and journals.
        step_end: called after every step; decides whether it was the last.
        first_step_done: called once, before the first step is journalled.
        evaluation: what is evaluated after some steps; None for nothing.
        start_step: steps that earlier attempts have done.
        profile: profiles some of the steps; None for none.
        backend: compares gradients while the run trains; None for nothing.

    Raises:
        TrainingError: a loss or gradient was not finite; the weights are those before that step.
    """
    span = profile.span if profile is not None else _unnamed
    engine.forward_done = recorder.own_time.end
    recorder.restart_clock()
    with collected_every(cfg.gc_every) as collect:
        for step in range(start_step + 1, cfg.steps + 1):
            engine.guard.step = step
            lr = engine.lr
            if profile is not None:
                profile.step_begins(step)
            with span("forward and backward"):
                loss, disturbed = _accumulate(
                    engine, feed, cfg.grad_accumulation, device, recorder, step_end, backend or BackendRun()
                )
            with span("optimizer"):
                grad_norm = engine.step()
            collect(step)
            recorder.step_done()
            disturbed = (profile is not None and profile.step_ends(step)) or disturbed
            if disturbed:
                recorder.disturbed()
            if step == start_step + 1:
                first_step_done()
            evaluates = evaluation is not None and evaluation.is_due(step)
            # Before an evaluation or a checkpoint: it raises if the weights of this step cannot be trusted.
            if recorder.is_log_step(step) or engine.known_discarded or evaluates:
                engine.check_agreement()
                recorder.log(step, loss, grad_norm, lr, engine)
            eval_loss = None
            if evaluation is not None and evaluates:
                eval_loss = evaluation.run(engine, step)
            if step_end.run(step, eval_loss):
                return
    recorder.finish(cfg.steps)


def _unnamed(_name: str) -> contextlib.AbstractContextManager[None]:
    return _NOTHING


def _accumulate(
    engine: Engine,
    feed: Feed,
    count: int,
    device: torch.device,
    recorder: Recorder,
    step_end: StepEnd,
    backend: BackendRun,
) -> tuple[torch.Tensor, bool]:
    """Forward and backward over the micro-batches of one step.

    Returns:
        The mean of their weighed losses, still on the device, and whether `backend` took the time of some steps.
    """
    total = torch.zeros((), device=device)
    disturbed = False
    waited = feed.waited
    feed.begin_step(count)
    for index in range(count):
        recorder.own_time.begin()
        batch = feed.take()
        recorder.micro_batch(batch)
        step_end.beat()
        disturbed |= backend.fit(batch)
        if index == 0:
            disturbed |= backend.recheck(engine.guard.step, batch)
        total += engine.micro_step(batch, last=index == count - 1, weight=feed.weight)
        disturbed |= backend.check_decisions(batch)
        recorder.own_time.begin()
        feed.prefetch()
        recorder.own_time.end()
    recorder.waited_for_data(feed.waited - waited)
    return total / count, disturbed
