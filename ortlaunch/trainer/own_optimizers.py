"""Optimizers that a user names: made, tried on a few numbers before the first step, and several of them as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Adagrad, Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import check_arguments, load_target
from ortlaunch.config.load import first_line
from ortlaunch.config.schema import ParameterGroups

_Build = Callable[[ParameterGroups], Optimizer]
_OF_KEYS = ("lr", "weight_decay")
"""Arguments that have keys of their own."""


class Several(Optimizer):
    """Optimizers over different weights, which act as one. They share their groups and their state with it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            first = last


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that one consists of."""
    return optimizer.parts if isinstance(optimizer, Several) else [optimizer]


def made(
    target: str, params: Mapping[str, Any], groups: ParameterGroups, lr: float, key: str, in_pieces: str | None
) -> Optimizer:
    """Makes an optimizer of the user's choice, and tries it on weights of a few numbers.

    Args:
        target: its class, ``package.module:Class``.
        params: further arguments of the class.
        groups: the parameters, with the ``lr`` and the ``weight_decay`` of each group.
        lr: the learning rate.
        key: the node that has the keys ``target`` and ``params``.
        in_pieces: the trainer that hands weights on in flat pieces, as a key and its value; None if they stay whole.

    Raises:
        RequestError: there is no such class, it does not take the arguments or the weights, its step needs more than
            gradients, or updates pieces of a weight in another way than the whole of it.
    """
    where = f"{key}.target={target}"
    called = load_target(target, where)
    for name in _OF_KEYS:
        if name in params:
            raise RequestError(f"{key}.params.{name}: give it by optimizer.{name}, or by a group of optimizer.groups")
    if isinstance(called, type) and not issubclass(called, Optimizer):
        raise RequestError(f"{where} is no torch.optim.Optimizer")
    _check_step(called, where)
    check_arguments(called, params, target, f"{key}.params", given=_OF_KEYS, positional=1)
    if not _takes(called, "weight_decay") and any(group["weight_decay"] for group in groups):
        raise RequestError(f"{where}: the class has no weight_decay: set optimizer.weight_decay=0")
    arguments = {**params, **({"lr": lr} if _takes(called, "lr") else {})}

    def build(parameters: ParameterGroups) -> Optimizer:
        try:
            optimizer = called(parameters, **arguments)
        except Exception as error:
            raise RequestError(f"{where} cannot be built: {first_line(error)}") from error
        if not isinstance(optimizer, Optimizer):
            raise RequestError(f"{where} makes a {type(optimizer).__name__}, which is no torch.optim.Optimizer")
        return optimizer

    optimizer = build(groups)
    _check_step(optimizer, where)
    weights = [one for group in groups for one in group["params"]]
    # As real numbers, also where `ortlaunch estimate` has none.
    with _disable_current_modes():
        _try(build, weights, where, in_pieces)
    return optimizer


def _check_step(owner: object, where: str) -> None:
    """Refuses an optimizer, or the class of one, whose step needs more than gradients."""
    step = getattr(owner, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(f"{where}: its step computes the loss again by a closure, which a step of a run has not")


def _takes(called: Callable[..., Any], name: str) -> bool:
    try:
        arguments = inspect.signature(called).parameters
    except (TypeError, ValueError):  # Some callables that are written in C have no signature.
        return True
    return name in arguments or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in arguments.values())


def _try(build: _Build, weights: Sequence[torch.Tensor], where: str, in_pieces: str | None) -> None:
    """Takes a few steps on a small weight, and on pieces of it where a trainer hands them on.

    Raises:
        RequestError: a step fails, or pieces do not move as the weight does.
    """
    dimensions = max((one.ndim for one in weights), default=0)
    shape = (*(2,) * (dimensions - 2), 4, 6) if dimensions > 1 else (24,) * dimensions
    draws = torch.Generator().manual_seed(0)
    begin, *gradients = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(4))
    weight = torch.nn.Parameter(begin.clone())
    optimizer = build([_group(weight)])
    try:
        for gradient in gradients:
            _step(optimizer, weight, gradient)
    except Exception as error:
        raise RequestError(f"{where}: its step fails on a small weight: {first_line(error)}") from error
    if in_pieces is None:
        return
    first = weights[0]
    try:
        if isinstance(first, DTensor):
            together = _as_shards(build, begin, gradients, first.device_mesh)
        else:
            together = _in_flat_pieces(build, begin, gradients)
        moved, off = weight.detach() - begin, together - weight.detach()
        reason = "" if off.norm() <= 1e-6 * moved.norm() else "they move in another way than the whole weight"
    except Exception as error:
        reason = first_line(error)
    if reason:
        raise RequestError(
            f"{where} does not go with {in_pieces}, which hands the optimizer pieces of weights: a trial on a small "
            f"weight says: {reason}. Use trainer=ddp"
        )


def _as_shards(build: _Build, begin: torch.Tensor, gradients: Sequence[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Trains a sharded weight of which each worker has such a piece; returns the piece."""

    def sharded(piece: torch.Tensor) -> DTensor:
        return DTensor.from_local(piece.clone(), mesh, [Shard(0)], run_check=False)

    weight = torch.nn.Parameter(sharded(begin))
    optimizer = build([_group(weight)])
    for gradient in gradients:
        _step(optimizer, weight, sharded(gradient))
    piece: torch.Tensor = weight.detach().to_local()  # type: ignore[attr-defined]
    return piece.cpu()


def _in_flat_pieces(build: _Build, begin: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Trains flat pieces that take a weight's place one after the other, as DeepSpeed does; returns them together.

    DeepSpeed gives weights without a gradient zeros.
    """
    pieces = [torch.nn.Parameter(piece.clone()) for piece in begin.flatten().split(10)]
    idle = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = build([_group(torch.nn.Parameter(one.detach().clone())) for one in (begin, idle)])
    if isinstance(optimizer, Adagrad):
        raise ValueError("DeepSpeed makes an Adagrad of its own, without groups and schedule")
    of_pieces, of_idle = optimizer.param_groups
    for gradient in gradients:
        of_idle["params"] = []
        for piece, share in zip(pieces, gradient.flatten().split(10), strict=True):
            of_pieces["params"] = [piece]
            _step(optimizer, piece, share)
        of_pieces["params"], of_idle["params"] = [], [idle]
        _step(optimizer, idle, torch.zeros_like(idle))
    if not (idle == 1).all():
        raise ValueError("it moves weights whose gradient is zero")
    return torch.cat([piece.detach() for piece in pieces]).view(begin.shape)


def _group(weight: torch.nn.Parameter) -> dict[str, Any]:
    return {"params": [weight], "lr": 0.01, "weight_decay": 0.0}


def _step(optimizer: Optimizer, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    weight.grad = gradient.clone()
    optimizer.step()
