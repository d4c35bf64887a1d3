"""The training loop."""

from __future__ import annotations

from ortlaunch.trainer.evaluation import Evaluation
from ortlaunch.trainer.hooks import Hooks
from ortlaunch.trainer.mean import Mean
from ortlaunch.trainer.session import Session


def train(session: Session, hooks: Hooks, evaluation: Evaluation | None = None) -> None:
    """Takes optimizer steps to the run's last one, or until it is asked to stop; all workers call it.

    Args:
        session: the run, which has begun.
        hooks: what acts beside the training.
        evaluation: what is evaluated after some steps; None for nothing.

    Raises:
        RequestError: a batch or a hook shows that the run cannot be right.
        TrainingError: a loss or a gradient was not finite; the weights are those before that step.
    """
    engine = session.engine
    hooks.start()
    for step in session.steps():
        lr = engine.lr
        mean = Mean(session.config.train.grad_accumulation, session.workers.device)
        hooks.step_begins(step)
        with hooks.span("forward and backward"):
            for micro in session.micro_batches():
                hooks.micro_batch_begins(step, micro.index, micro.batch)
                mean.add(engine.micro_step(micro.batch, last=micro.last, weight=micro.weight))
                hooks.micro_batch_ends(micro.batch)
        with hooks.span("optimizer"):
            grad_norm = engine.step()
        session.step_done(step)
        hooks.step_ends(step)
        evaluates = evaluation is not None and evaluation.is_due(step)
        # Before an evaluation or a checkpoint: it raises if the weights of this step cannot be trusted.
        if evaluates or session.is_logged(step):
            session.log(step, mean, grad_norm, lr)
        hooks.step()
        if evaluation is not None and evaluates:
            session.scored(step, evaluation.run(engine, step))
            hooks.evaluation()
        if session.saves(step):
            session.save(step)
            hooks.checkpoint()
    hooks.end()
