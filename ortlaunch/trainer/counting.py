"""Which items the losses of a run are means over; see `ortlaunch.models.items`."""

from __future__ import annotations

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import load_target
from ortlaunch.data.batch import cloned, joined
from ortlaunch.models.items import RULES, SAMPLES, Items, fitting_rules, samples
from ortlaunch.models.registry import is_built_in
from ortlaunch.models.task import Task
from ortlaunch.trainer.feed import Lookahead
from ortlaunch.trainer.session import Session
from ortlaunch.trainer.workers import values_of_all

_UNKNOWN = (
    "the loss of this model is no mean over samples or over labels other than -100, so each micro-batch weighs by its "
    "samples, and what is trained depends on train.batch_size, train.grad_accumulation and the workers: let "
    "train.items=module:function return how many items a batch's loss is a mean over"
)


def counted_items(
    session: Session, model: torch.nn.Module, task: Task, batches: Lookahead, *, labels_vary: bool
) -> Items | None:
    """What each micro-batch's loss is a mean over; None where all micro-batches have as many. All workers call it.

    Args:
        session: this worker's run.
        model: the plain model, on the CPU.
        task: how it is called.
        batches: the data; the first samples are looked at, and stay.
        labels_vary: whether samples may have other numbers of labels that count.

    Raises:
        RequestError: ``train.items`` cannot be imported, or returns no number for the first batch.
    """
    config = session.config
    if config.train.items is not None:
        return _asked(config.train.items, batches)
    own: Items | None = getattr(model, "loss_items", None)
    alike = samples if batches.loader.is_uneven else None
    if own is not None or (is_built_in(config.model) and not labels_vary):
        return own or alike
    fitting = set.intersection(*values_of_all(_fitting(model, task, batches, labels_vary), session.control))
    rule = next((name for name in RULES if name in fitting), None)
    if rule is None and session.workers.world_size * config.train.grad_accumulation > 1 and session.journal is not None:
        print(f"warning: {_UNKNOWN}", flush=True)
        session.journal.tags({"ortlaunch.loss_items": "unknown"})
    return RULES[rule] if rule not in (None, SAMPLES) and labels_vary else alike


def _asked(target: str, batches: Lookahead) -> Items:
    where = f"train.items={target}"
    items = load_target(target, where)
    (first,) = batches.peek(1)
    found = items(cloned(first))
    try:
        if not 0 <= int(found) == found:
            raise ValueError
    except (TypeError, ValueError):
        raise RequestError(f"{where} returned {found!r} for the first batch: return how many items it has") from None
    return lambda batch: int(items(batch))


def _fitting(model: torch.nn.Module, task: Task, batches: Lookahead, labels_vary: bool) -> set[str]:
    (first,) = batches.peek(1)
    if samples(first) < 2:
        first = joined(*batches.peek(2))
        if first is None:
            # Samples of different lengths, which the data knows how to put together.
            first = batches.loader.first_samples(2)
        if first is None:
            return set()
    return fitting_rules(model, task, first, labels_vary=labels_vary)
