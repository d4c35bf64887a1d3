"""How a model is called with a batch, and how its loss is found.

The plain model's signature decides this once, because a wrapped model no longer shows it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import LABELS, PROBABILITIES, described, labels
from ortlaunch.data.batch import Batch as Batch
from ortlaunch.models.positions import MadeByModel, makes_positions

_NAMED = 5
"""Keys of an output that a message names."""


@dataclass(frozen=True)
class Result:
    """What comes of a micro-batch."""

    loss: torch.Tensor
    """A scalar on the model's device."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Named values: numbers or scalar tensors of a step; in an evaluation also ``preds`` and ``target``."""


@dataclass(frozen=True)
class Task:
    """Which entries of a batch become which arguments of the model."""

    by_name: tuple[str, ...]
    """Keys passed as keyword arguments."""
    by_position: tuple[str | int, ...] = ()
    """Keys of a dict, or places in a tuple, that are passed as positional arguments, in this order."""
    makes_positions: bool = False
    """Whether the model is certain to make its tokens' positions itself; see `ortlaunch.models.positions`."""
    as_one: bool = False
    """Whether the batch as a whole is the only argument."""

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Any:
        """Runs the model on a batch."""
        positional = [batch] if self.as_one else [batch[name] for name in self.by_position]
        with MadeByModel() if self.makes_positions else contextlib.nullcontext():
            return model(*positional, **{name: batch[name] for name in self.by_name})

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Runs the model on a batch and returns the loss, a scalar tensor on the model's device.

        Raises:
            RequestError: the outputs hold neither a loss nor logits that fit the labels.
        """
        return self.run(model, batch).loss

    def run(self, model: torch.nn.Module, batch: Batch) -> Result:
        """The same, with the values that training logs beside the loss."""
        return Result(loss_of(self.outputs(model, batch), batch))

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> Result:
        """The same in an evaluation, with the logits and labels as ``preds`` and ``target`` where there are such."""
        outputs = self.outputs(model, batch)
        logits, target = logits_of(outputs), labels(batch)
        found = {} if logits is None or target is None else {"preds": logits, "target": target}
        return Result(loss_of(outputs, batch), found)

    def state(self) -> dict[str, Any]:
        """What the step itself must keep in a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the model is called beside the training; the step's own state is as before at its end."""
        return contextlib.nullcontext()


def make_task(model: torch.nn.Module, batch: Batch) -> Task:
    """Matches a batch with the parameters of the model's forward.

    The entries of a dict are passed by name. Labels are passed only to a model that has a parameter for them. If
    forward has another name for its main input than the data (``x`` instead of ``pixel_values``), the first entry is
    passed by position. A tuple is passed by position, without its last entry, the labels, if forward takes one less.
    Anything else is one argument.

    Raises:
        RequestError: forward needs an argument that the data does not give.
    """
    parameters = inspect.signature(model.forward).parameters
    if not isinstance(batch, Mapping):
        return _by_position(parameters, batch)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_name = tuple(name for name in batch if name in named or (takes_any and name not in (LABELS, PROBABILITIES)))
    main = next(iter(batch))
    # The first parameter may have an entry of its name already.
    by_position = () if main in by_name or next(iter(parameters), None) in by_name else (main,)
    given = set(by_name) | set(list(parameters)[: len(by_position)])
    needed = [n for n, p in parameters.items() if p.default is p.empty and n in named and n not in given]
    if needed:
        raise RequestError(
            f"the model's forward needs {', '.join(needed)} and the data gives {', '.join(batch)}: "
            "name its parameters so, give them defaults, or choose another data=…"
        )
    return Task(by_name, by_position, makes_positions=makes_positions(model, batch))


def _by_position(parameters: Mapping[str, inspect.Parameter], batch: Batch) -> Task:
    """Matches a tuple, or anything else that is no dict, with the parameters of a forward."""
    if not isinstance(batch, tuple | list):
        return Task((), as_one=True)
    places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    given = len(batch)
    if not takes_any and given == len(places) + 1 and labels(batch) is not None:
        given -= 1
    if (given > len(places) and not takes_any) or given < sum(p.default is p.empty for p in places):
        raise RequestError(
            f"the model's forward takes {', '.join(p.name for p in places) or 'nothing'} and the data gives a tuple of "
            f"{len(batch)} ({described(batch)}): let forward take as many arguments, or let the data give a dict"
        )
    return Task((), tuple(range(given)))


def with_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The loss itself, before its backward. PyTorch would refuse it there without naming the model.

    Raises:
        RequestError: the loss depends on no parameter that is trained.
    """
    if not loss.requires_grad:
        raise RequestError(
            "the model's loss depends on none of the parameters that are trained, so nothing would be learnt: forward "
            "computes it under torch.no_grad(), or from .detach(), .item() or NumPy: compute it from tensors alone"
        )
    return loss


def weighed(loss: torch.Tensor, weight: float | None) -> torch.Tensor:
    """The loss times the weight of its micro-batch; None stands for 1."""
    if weight is None:
        return loss
    # A mean over no items is no number, and its gradients would be none.
    return loss * weight if weight else loss.nan_to_num() * 0.0


def loss_of(outputs: Any, batch: Batch) -> torch.Tensor:
    """The loss in a model's outputs, or the loss that is computed from its logits and the batch's labels.

    A model may return its loss (a scalar tensor, ``.loss``, ``["loss"]``, or first in a tuple) or logits (a tensor,
    ``.logits``, ``["logits"]``). For logits, integer labels and probabilities mean cross-entropy over the last
    dimension, and floating-point labels mean the mean squared error.

    Raises:
        RequestError: the outputs hold neither a loss of one number nor logits that fit the labels.
    """
    loss = _entry(_main(outputs), "loss")
    if isinstance(loss, torch.Tensor):
        return scalar(loss)
    logits = logits_of(outputs)
    if logits is not None and logits.dim() == 0:
        return logits
    target = _probabilities(batch) if labels(batch) is None else labels(batch)
    if logits is None or target is None:
        raise RequestError(
            f"the model's output, {_described(_main(outputs))}, holds no loss and no logits: return a scalar tensor, "
            "or a dict with 'loss'"
        )
    if target is _probabilities(batch):
        if target.shape != logits.shape:
            raise RequestError(
                f"the data has {target.shape[-1]} classes and the model's logits have shape {tuple(logits.shape)}: let "
                "the model have as many"
            )
        return functional.cross_entropy(logits.float(), target)
    if target.is_floating_point():
        if target.numel() != logits.numel():
            raise RequestError(
                f"the model's logits have shape {tuple(logits.shape)} and the labels {tuple(target.shape)}: labels "
                "that are no whole numbers must have the logits' shape"
            )
        return functional.mse_loss(logits.float(), target.reshape(logits.shape).float())
    if logits.shape[:-1] != target.shape:
        raise RequestError(
            f"the model's logits have shape {tuple(logits.shape)} and the labels {tuple(target.shape)}: "
            "logits must be the labels' shape with the classes as last dimension"
        )
    # The loss is computed in fp32 in every precision, as models that compute their own loss do.
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), target.reshape(-1))


def _probabilities(batch: Batch) -> torch.Tensor | None:
    found = batch.get(PROBABILITIES) if isinstance(batch, Mapping) else None
    return found if isinstance(found, torch.Tensor) else None


def logits_of(outputs: Any) -> torch.Tensor | None:
    """The logits in a model's outputs: a tensor, ``.logits`` or ``["logits"]``; None if there are none."""
    main = _main(outputs)
    logits = main if isinstance(main, torch.Tensor) else _entry(main, "logits")
    return logits if isinstance(logits, torch.Tensor) else None


def _main(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs


def scalar(loss: torch.Tensor, whose: str = "the model's loss") -> torch.Tensor:
    """A loss of one number without dimensions, as the engines add it up; `whose` it is, for a message."""
    if loss.dim() == 0:
        return loss
    if loss.numel() != 1:
        raise RequestError(f"{whose} has the shape {tuple(loss.shape)}: return one number, such as its mean")
    return loss.reshape(())


def _described(outputs: Any) -> str:
    """What a model has returned, in few words, for a message."""
    if outputs is None:
        return "None"
    kind = type(outputs).__name__
    if isinstance(outputs, dict) and outputs:
        return f"a {kind} with {', '.join(map(repr, list(outputs)[:_NAMED]))}"
    return f"an empty {kind}" if isinstance(outputs, dict | tuple | list) and not outputs else f"a {kind}"


def _entry(outputs: Any, name: str) -> Any:
    if isinstance(outputs, dict):
        return outputs.get(name)
    return getattr(outputs, name, None)
