"""Chooses the loss that a device trains with, and prepares its labels."""

from __future__ import annotations

import torch
from torch.nn import functional

from ortlaunch.base.errors import RequestError
from ortlaunch.export.forward import LABELS, LOGITS, LOSS, Forward
from ortlaunch.models.task import Batch, loss_of, make_task
from ortlaunch.ort.verify.nested import NamedTensors


def choose(asked: str | None, model: torch.nn.Module, batch: Batch) -> str:
    """Returns the requested loss, or the one that a run trains with.

    Raises:
        RequestError: the model returns no loss, and none can be computed from the labels.
    """
    if LABELS not in batch:
        raise RequestError("the data gives no labels, and training on a device needs them: choose another data=…")
    if asked is not None:
        return asked
    with torch.no_grad():
        outputs = make_task(model, batch).outputs(model, batch)
        loss_of(outputs, batch)
    if LOSS in Forward.named(outputs):
        return "own"
    return "mse" if batch[LABELS].is_floating_point() else "cross_entropy"


def check_fits(loss: str, logits: torch.Tensor | None, labels: torch.Tensor) -> None:
    """Checks that the loss can be computed from these logits and labels.

    Raises:
        RequestError: it cannot; the message names the shapes.
    """
    if loss == "own":
        return
    if logits is None:
        raise RequestError(f"loss={loss} is computed from logits, and the model returns none: choose loss=own")
    if loss != "cross_entropy":
        target(loss, logits, labels)
        return
    if logits.dim() != 2 or labels.is_floating_point():
        raise RequestError(
            f"loss=cross_entropy takes logits [samples, classes] and whole numbers for labels; the model gives "
            f"{tuple(logits.shape)} and the data {labels.dtype} {tuple(labels.shape)}: choose loss=own"
        )


def target(loss: str, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the labels in the form that the artifacts take.

    Args:
        loss: one of own, cross_entropy, mse, bce.
        logits: the model's logits.
        labels: the labels of the data; for mse and bce, class indices become one-hot rows.

    Raises:
        RequestError: the labels do not fit the logits.
    """
    if loss in ("own", "cross_entropy"):
        return labels
    if not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
        return functional.one_hot(labels, logits.shape[-1]).float()
    if labels.numel() != logits.numel():
        raise RequestError(
            f"loss={loss} compares logits {tuple(logits.shape)} with labels of that shape, and the data gives "
            f"{tuple(labels.shape)}"
        )
    return labels.reshape(logits.shape).float()


def in_pytorch(loss: str, outputs: NamedTensors, labels: torch.Tensor) -> torch.Tensor:
    """Computes the same loss in PyTorch.

    Args:
        loss: one of own, cross_entropy, mse, bce.
        outputs: the model's outputs, by name.
        labels: the labels that `target` returned.
    """
    if loss == "own":
        return outputs[LOSS]
    if loss == "cross_entropy":
        return functional.cross_entropy(outputs[LOGITS], labels)
    if loss == "mse":
        return functional.mse_loss(outputs[LOGITS], labels)
    return functional.binary_cross_entropy_with_logits(outputs[LOGITS], labels)
