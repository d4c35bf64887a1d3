"""Whether a model keeps apart the conversations that lie in one sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import Batch, cloned
from ortlaunch.models.modes import evaluation, untouched
from ortlaunch.models.task import Task, logits_of

_MASK, _POSITIONS = "attention_mask", "position_ids"
_ROUNDING = 1e-3


def check_apart(model: torch.nn.Module, task: Task, batch: Batch) -> None:
    """Computes the second conversation of a sample alone and beside the first one.

    Args:
        model: the plain model on the CPU; it is not changed.
        task: how it is called. A step of the user's own is taken at its word.
        batch: of conversations, each of which begins with position 0.

    Raises:
        RequestError: the model takes neither mask nor positions, or computes something else in company.
    """
    found = _second(batch)
    if found is None or not task.by_name:
        return
    row, begin, end = found
    whole = {name: one[row : row + 1] for name, one in batch.items()}
    alone = {
        name: one[:, :, begin:end, begin:end] if name == _MASK else one[:, begin:end] for name, one in whole.items()
    }
    with untouched(model), evaluation(model), torch.no_grad():
        together, single = (logits_of(task.outputs(model, cloned(one))) for one in (whole, alone))
    if together is None or single is None:
        return
    off = (together[:, begin:end] - single).abs().max()
    if off > _ROUNDING * single.abs().max():
        raise RequestError(
            f"data.packing=true puts several conversations into one sample, and {type(model).__name__} does not keep "
            f"them apart by {_MASK} and {_POSITIONS}: alone one has other logits (by {float(off):.2g}): set "
            "data.packing=false"
        )


def _second(batch: Batch) -> tuple[int, int, int] | None:
    """A row of a batch, and begin and end of its second conversation; None where each row has but one."""
    if not isinstance(batch, Mapping) or batch[_MASK].ndim != 4:
        return None
    for row, positions in enumerate(batch[_POSITIONS]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        if len(starts) > 2:
            return row, starts[1], starts[2]
    return None
