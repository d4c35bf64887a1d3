"""The loss and the metrics of held-out samples, each of which counts once."""

from __future__ import annotations

import time

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.scores import Wanted
from ortlaunch.data.batch import Batch, cloned, moved, part
from ortlaunch.data.holdout import HeldOut
from ortlaunch.models.items import Items, items_of
from ortlaunch.models.modes import evaluation, untouched
from ortlaunch.models.own_step import PREDS, TARGET
from ortlaunch.models.task import Result, Task
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.hooks import Hook
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.scores import Scores
from ortlaunch.trainer.workers import Workers

_TAKEN = ("loss", "seconds")
"""Names of values that each evaluation has."""


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
        hook: Hook,
        scores: Scores,
        names: list[str],
    ) -> None:
        """
        Args:
            batches: this worker's, on the CPU; all workers have the same number of them.
            items: what the loss of a batch is a mean over.
            every: steps between two evaluations.
            last_step: the run's last step, after which there is always an evaluation.
            workers: this worker's place.
            recorder: journals the result.
            hook: called with each batch before and after it is evaluated.
            scores: the metrics.
            names: the further numbers that the evaluation's step returns; means over the items.
        """
        self._batches = [one.batch for one in batches]
        self._items = [float(items_of(items, one.batch, one.samples)) for one in batches]
        self._every = every
        self._last_step = last_step
        self._workers = workers
        self._recorder = recorder
        self._hook = hook
        self._scores = scores
        self._names = names

    @property
    def directions(self) -> dict[str, bool | None]:
        """Of each value by its full name, whether higher is better; None where that is not known."""
        known: dict[str, bool | None] = {"loss": False} | dict.fromkeys(self._names) | self._scores.directions
        return {f"eval/{name}": higher for name, higher in known.items()}

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        return step % self._every == 0 or step == self._last_step

    def run(self, engine: Engine, step: int) -> dict[str, float]:
        """Evaluates the model, and journals the values.

        Returns:
            By their full names, the mean loss over the items of all workers, the metrics and the further numbers.
        """
        began = time.perf_counter()
        rows = []
        self._scores.reset()
        with engine.evaluating(), engine.task.kept():
            for place, batch in enumerate(self._batches):
                # Copies, since a forward may change its inputs in place, and each evaluation is to be of the same data.
                here = moved(batch, self._workers.device, copy=True)
                self._hook.evaluates(here)
                result = engine.evaluate(here)
                rows.append(torch.stack([_number(one, result.loss) for one in (result.loss, *self._further(result))]))
                if self._items[place]:
                    self._scores.update(result, place * self._workers.world_size + self._workers.rank)
                self._hook.evaluated(here)
        means = self._means(torch.stack(rows).double().tolist())
        values = dict(zip(("loss", *self._names), means, strict=True)) | self._scores.computed()
        found = {f"eval/{name}": value for name, value in values.items()}
        self._recorder.evaluated(step, {**found, "eval/seconds": time.perf_counter() - began})
        return found

    def _further(self, result: Result) -> list[float | torch.Tensor]:
        if numbers_of(result).keys() != set(self._names):
            raise RequestError(
                f"eval.step returned the numbers {sorted(numbers_of(result))} for a batch and {self._names} for the "
                "first one: return the same names for each"
            )
        return [result.values[name] for name in self._names]

    def _means(self, rows: list[list[float]]) -> list[float]:
        """The means over the items of all workers, added in the order of the batches whoever computed them."""
        mine = [[items, *row] for items, row in zip(self._items, rows, strict=True)]
        everyone = self._workers.gather([one for row in mine for one in row])
        ordered = everyone.unflatten(1, (len(mine), -1)).transpose(0, 1).flatten(0, 1)
        items, values = ordered[ordered[:, 0] > 0].split([1, ordered.shape[1] - 1], dim=1)
        return ((items * values).sum(0) / items.sum()).tolist()


def first_result(model: torch.nn.Module, task: Task, batch: Batch) -> Result:
    """What an evaluation returns for two samples of a batch, of the plain model on the CPU; it is not changed."""
    few = part(batch, 0, 2)
    with untouched(model), evaluation(model), torch.no_grad(), task.kept():
        return task.evaluate(model, cloned(batch if few is None else few))


def scores_of(metrics: list[Wanted], first: Result, workers: Workers, *, of_model: bool) -> tuple[Scores, list[str]]:
    """The metrics of a run, and the names of the further numbers; see `Scores` and `Evaluation`.

    Raises:
        RequestError: a metric cannot be had, or two values have the same name.
    """
    names = sorted(numbers_of(first))
    taken = [*_TAKEN, *names]
    for one in metrics:
        if one.name in taken:
            raise RequestError(
                f"eval.metrics: eval/{one.name} is there already: give the metric another name by as: NAME"
            )
    return Scores(metrics, first, workers.device, of_model=of_model), names


def no_scores() -> tuple[Scores, list[str]]:
    """Those of an evaluation that computes the loss alone."""
    return Scores([], Result(torch.zeros(())), torch.device("cpu"), of_model=True), []


def numbers_of(result: Result) -> dict[str, float | torch.Tensor]:
    """The values of an evaluation beside those for metrics."""
    return {name: value for name, value in result.values.items() if name not in (PREDS, TARGET)}


def _number(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    number = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return number.detach().reshape(()).to(like.device, torch.float64)
