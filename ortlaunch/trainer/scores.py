"""The metrics of an evaluation: torchmetrics' by name, or the user's own, over the samples of all workers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import load_target
from ortlaunch.config.scores import Wanted, class_of
from ortlaunch.models.masking import IGNORED
from ortlaunch.models.own_step import PREDS, TARGET
from ortlaunch.models.task import Result
from ortlaunch.trainer.workers import values_of_all

_SAME_LOSS = 1e-3
"""How far, as a share, the loss that a model returns may lie from that of its logits and labels."""


class Scores:
    """Metrics that take one batch after the other, and are computed over all workers."""

    def __init__(self, metrics: Sequence[Wanted], first: Result, device: torch.device, *, of_model: bool) -> None:
        """
        Args:
            metrics: which.
            first: of a held-out batch, whose shapes say how many classes there are.
            device: where batches are evaluated.
            of_model: whether `first` has a model's logits, whose last dimension are the classes. Otherwise the user's
                step has given what the metrics take.

        Raises:
            RequestError: there is no such metric, it does not take such arguments, or it cannot take the batch.
        """
        self._of_model = of_model
        self._shifts = bool(metrics) and _shifts(first, str(metrics[0]), of_model=of_model)
        self._metrics: dict[str, Any] = {}
        for one in metrics:
            with _named(one):
                metric = _made(one, *self._pair(first, flat=True))
                self._metrics[one.name] = metric.to(device) if hasattr(metric, "to") else metric
        if metrics:
            self.update(first, 0)
            self.reset()

    @property
    def directions(self) -> dict[str, bool | None]:
        """Of each metric by name, whether higher is better; None where it does not say."""
        return {name: getattr(metric, "higher_is_better", None) for name, metric in self._metrics.items()}

    def reset(self) -> None:
        """Before an evaluation."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, result: Result, number: int) -> None:
        """Takes a batch.

        Args:
            result: of the evaluation's step.
            number: of the batch among those of all workers.
        """
        for name, metric in self._metrics.items():
            preds, target = self._pair(result, flat=_takes_classes(metric))
            with _named(name):
                if isinstance(metric, _Gathered):
                    metric.take(preds, target, number)
                else:
                    metric.update(preds, target)

    def computed(self) -> dict[str, float]:
        """Each metric by name, over all batches of all workers, all of which call it."""
        return {name: self._value(name, metric) for name, metric in self._metrics.items()}

    def _value(self, name: str, metric: Any) -> float:
        with _named(name), warnings.catch_warnings():
            # A worker may have had no batch.
            warnings.filterwarnings("ignore", message=".*compute.* method of metric .* was called before.*")
            value = metric.compute()
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if not isinstance(value, int | float):
                raise RequestError(f"eval.metrics: {name} computes {_described(value)}: a metric is one number")
            return float(value)

    def _pair(self, result: Result, *, flat: bool) -> tuple[Any, Any]:
        """What a metric takes; `flat`: one row for each label, where a model has logits for each place of a sample."""
        preds, target = result.values[PREDS], result.values[TARGET]
        if self._shifts:
            preds, target = preds[:, :-1], target[:, 1:]
        if flat and self._of_model and target.ndim > 1 and preds.shape[:-1] == target.shape:
            preds, target = preds.reshape(-1, preds.shape[-1]), target.reshape(-1)
        return preds, target


class _Gathered:
    """A metric of the user that knows nothing of workers: it gets the batches of all of them, in their order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.higher_is_better = getattr(metric, "higher_is_better", None)
        self._taken: list[tuple[int, Any, Any]] = []

    def reset(self) -> None:
        self._taken = []

    def take(self, preds: Any, target: Any, number: int) -> None:
        self._taken.append((number, _on_host(preds), _on_host(target)))

    def compute(self) -> Any:
        everyone = [self._taken]
        if torch.distributed.is_initialized():
            everyone = values_of_all(self._taken)
        batches = sorted((one for taken in everyone for one in taken), key=lambda one: one[0])
        if not hasattr(self._metric, "update"):
            return self._metric(*(_joined([batch[place] for batch in batches]) for place in (1, 2)))
        if hasattr(self._metric, "reset"):
            self._metric.reset()
        for _, preds, target in batches:
            self._metric.update(preds, target)
        return self._metric.compute()


def _made(one: Wanted, preds: Any, target: Any) -> Any:
    if one.target is None:
        return _of_torchmetrics(one, preds, target)
    found: Any = load_target(one.target, str(one))
    if not inspect.isclass(found):
        return _Gathered(found)
    metric = found(**one.arguments)
    if not (callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))):
        raise RequestError(f"{one}: a class needs update(preds, target) and compute(), as torchmetrics' have them")
    return metric if _synchronizes(metric) else _Gathered(metric)


def _synchronizes(metric: Any) -> bool:
    try:
        from torchmetrics import Metric
    except ImportError:
        return False
    return isinstance(metric, Metric)


def _of_torchmetrics(one: Wanted, preds: Any, target: Any) -> Any:
    arguments = dict(one.arguments)
    name = str(arguments.pop("name"))
    found = _class(class_of(name))
    taken = inspect.signature(found.__new__ if _has_tasks(found) else found.__init__).parameters
    if _has_tasks(found):
        arguments = _of_task(preds, target) | arguments
        if found.__name__ == "F1Score":
            arguments = {"average": "macro"} | arguments
    if "ignore_index" in taken and isinstance(target, torch.Tensor) and not target.is_floating_point():
        arguments = {"ignore_index": IGNORED} | arguments
    return found(**arguments)


def _class(name: str) -> Any:
    import torchmetrics
    import torchmetrics.text

    return getattr(torchmetrics, name, None) or getattr(torchmetrics.text, name)


def _has_tasks(found: Any) -> bool:
    """Whether a class makes that of the task which its argument `task` names."""
    return "task" in inspect.signature(found.__new__).parameters


def _of_task(preds: Any, target: Any) -> dict[str, Any]:
    """The task of a classification, and its classes, by the shapes of a batch."""
    if not isinstance(preds, torch.Tensor) or not isinstance(target, torch.Tensor):
        return {}
    if preds.shape == target.shape:
        if preds.ndim > 1 and preds.is_floating_point():
            return {"task": "multilabel", "num_labels": preds.shape[1]}
        return {"task": "binary"} if preds.is_floating_point() else {"task": "multiclass"}
    return {"task": "multiclass", "num_classes": preds.shape[1] if preds.ndim == target.ndim + 1 else None}


def _takes_classes(metric: Any) -> bool:
    return type(metric).__module__.startswith("torchmetrics.classification")


def _shifts(first: Result, where: str, *, of_model: bool) -> bool:
    """Whether the labels of a place are those of the next logits, as a causal language model's loss has it."""
    preds, target = first.values.get(PREDS), first.values.get(TARGET)
    if preds is None or target is None:
        raise RequestError(
            f"{where}: metrics are computed from preds and target, and this model or step gives none: let "
            'eval.step=module:function return (loss, {"preds": …, "target": …})'
        )
    if not of_model or target.is_floating_point() or preds.ndim != target.ndim + 1:
        return False
    for shifts in (False, True):
        rows, labels = (preds[:, :-1], target[:, 1:]) if shifts and target.ndim > 1 else (preds, target)
        loss = functional.cross_entropy(rows.reshape(-1, rows.shape[-1]).float(), labels.reshape(-1))
        if abs(float(loss) - float(first.loss)) <= _SAME_LOSS * abs(float(first.loss)):
            return shifts
    raise RequestError(
        f"{where}: the loss of this model is not that of its logits and labels, so what metrics would say of them is "
        'not known: let eval.step=module:function return (loss, {"preds": …, "target": …})'
    )


@contextmanager
def _named(one: Wanted | str) -> Iterator[None]:
    """Says whose error it is; the arguments and batches are the user's."""
    where = str(one) if isinstance(one, Wanted) else f"eval.metrics: {one}"
    try:
        yield
    except RequestError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise RequestError(f"{where}: {type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _joined(values: list[Any]) -> Any:
    if values and isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return [one for value in values for one in value]


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
