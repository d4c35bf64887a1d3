"""What a micro-batch's loss is a mean over: samples, or labelled tokens, whose number differs between micro-batches.

The loss of a step is the mean over all items of its micro-batches on all workers. A micro-batch whose loss is a mean
over fewer items then weighs less. What a model takes the mean over is asked of the request (``train.items``) and of a
built-in model, or else measured: a mean over items gives two samples together what both give apart, weighed by their
items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ortlaunch.data.batch import Batch, cloned, count, joined, labels, part
from ortlaunch.models.masking import IGNORED
from ortlaunch.models.modes import evaluation, untouched
from ortlaunch.models.task import Task

Items = Callable[[Batch], int]

SAMPLES = "samples"
_LEFT_TO_RULES = 0.002
"""Of the difference between two samples' losses, how much a rule may miss; two rules differ by 0.1."""
_ROUNDING = 1e-6


def samples(batch: Batch) -> int:
    """The samples of a batch."""
    return count(batch)


def labelled(batch: Batch) -> int:
    """The labels of a batch that are not ignored (-100)."""
    found = labels(batch)
    return 0 if found is None else int((found != IGNORED).sum())


def predicted(batch: Batch) -> int:
    """The same for a causal model, which predicts no first token."""
    found = labels(batch)
    return 0 if found is None or not found.ndim else int((found[..., 1:] != IGNORED).sum())


RULES: Mapping[str, Items] = {SAMPLES: samples, "labels": labelled, "next labels": predicted}
"""From the simplest to the rarest; of several that fit, the first counts."""


def items_of(items: Items, batch: Batch, counted: int) -> int:
    """The items of a batch of which so many samples count; 0 if none does."""
    return counted if items is samples or not counted else items(batch)


def fitting_rules(model: torch.nn.Module, task: Task, batch: Batch, *, labels_vary: bool) -> set[str]:
    """The rules by which the loss of two samples of a batch is a mean; empty if there is none.

    Args:
        model: the plain model on the CPU; it is not changed.
        task: how the model is called.
        batch: at least two samples.
        labels_vary: whether samples may have other numbers of labels that count. Most labels of the two samples are
            hidden then, so that the rules differ.
    """
    rows = [part(batch, row, row + 1) for row in range(samples(batch))]
    if rows[0] is None:
        return set()
    # Of other numbers of labels the rules tell most apart where there are many.
    first, second = (cloned(one) for one in sorted(rows, key=labelled)[-2:]) if labels_vary else map(cloned, rows[:2])
    if labels_vary:
        many = labelled(second)
        _keep_labels(first, slice(0, min(2, max(1, many - 1))))
        _keep_labels(second, slice(1, 4) if many > 3 else slice(0, 3))
    measured = (first, second, joined(first, second))
    try:
        losses = [_loss(model, task, one) for one in measured]
    except Exception:  # A model may refuse such samples for any reason of its own.
        return set()
    return {name for name, rule in RULES.items() if _fits(losses, [rule(one) for one in measured])}


def _loss(model: torch.nn.Module, task: Task, batch: Batch) -> float:
    # Each goes out from the same state, and copies, since a forward may change its inputs in place.
    with untouched(model), evaluation(model), torch.no_grad():
        return float(task.loss(model, cloned(batch)))


def _fits(losses: list[float], counts: list[int]) -> bool:
    if 0 in counts[:2] or not all(map(math.isfinite, losses)):
        return False
    apart = (losses[0] * counts[0] + losses[1] * counts[1]) / counts[2]
    allowed = _LEFT_TO_RULES * abs(losses[0] - losses[1]) + _ROUNDING * max(abs(losses[0]), abs(losses[1]))
    return abs(apart - losses[2]) <= allowed


def _keep_labels(sample: Batch, some: slice) -> None:
    """Hides a sample's labels but some of those that count, if it has several classes as labels."""
    found = labels(sample)
    if found is not None and found.ndim > 1 and not found.is_floating_point():
        places = (found != IGNORED).nonzero()[some].unbind(1)
        kept = found[places]
        found.fill_(IGNORED)
        found[places] = kept
