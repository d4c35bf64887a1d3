"""The loss on held-out samples, each of which counts once."""

from __future__ import annotations

import time

import torch

from ortlaunch.data.holdout import HeldOut
from ortlaunch.models.items import Items
from ortlaunch.trainer.backend_run import BackendRun
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.workers import Workers


class Evaluation:
    """Evaluates a model on the same batches each time."""

    def __init__(
        self,
        batches: list[HeldOut],
        items: Items,
        every: int,
        last_step: int,
        workers: Workers,
        recorder: Recorder,
        backend: BackendRun,
    ) -> None:
        """
        Args:
            batches: this worker's, on the CPU; all workers have the same number of them.
            items: what the loss of a batch is a mean over.
            every: steps between two evaluations.
            last_step: the run's last step, after which there is always an evaluation.
            workers: this worker's place.
            recorder: journals the result.
            backend: compares what it computes with PyTorch where it has to.
        """
        self._batches = [one.batch for one in batches]
        self._items = [float(items(one.batch)) if one.counts else 0.0 for one in batches]
        self._every = every
        self._last_step = last_step
        self._workers = workers
        self._recorder = recorder
        self._backend = backend

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        return step % self._every == 0 or step == self._last_step

    def run(self, engine: Engine, step: int) -> float:
        """Evaluates the model; journals and returns the mean loss over the items of all workers."""
        began = time.perf_counter()
        losses = []
        with engine.evaluating():
            for batch in self._batches:
                # Copies, since a forward may change its inputs in place, and each evaluation is to be of the same data.
                here = {name: tensor.to(self._workers.device, copy=True) for name, tensor in batch.items()}
                self._backend.fit_evaluated(here)
                losses.append(engine.evaluate(here))
                self._backend.check_evaluated(here)
        mean = self._mean(torch.stack(losses).double().tolist())
        self._recorder.evaluated(step, {"eval/loss": mean, "eval/seconds": time.perf_counter() - began})
        return mean

    def _mean(self, losses: list[float]) -> float:
        """The mean over the items of all workers, added in the order of the batches whoever computed them."""
        everyone = self._workers.gather([*self._items, *losses]).unflatten(1, (2, -1)).permute(1, 2, 0).flatten(1)
        items, ordered = everyone[:, everyone[0] > 0]
        return float((items * ordered).sum() / items.sum())
