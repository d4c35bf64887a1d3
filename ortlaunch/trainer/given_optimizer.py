"""The optimizer of an engine: the configured one, or one that a script has made for its model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config
from ortlaunch.trainer.optimizers import build_optimizer
from ortlaunch.trainer.schedules import build_scheduler


def names_in(optimizer: Optimizer | None, model: torch.nn.Module) -> dict[int, str]:
    """The name of each weight of a script's optimizer in its model, by its id, before a trainer replaces weights.

    Args:
        optimizer: the optimizer that a script has made; None where the run makes its own.
        model: the model, which nothing is wrapped around.

    Raises:
        RequestError: the optimizer has weights that the model has not.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    given = [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]
    if any(id(weight) not in names for weight in given):
        raise RequestError(
            "run.wrap: the optimizer has weights that the model has not: wrap each model with an optimizer of its own, "
            "made of its parameters(), or put models that share one into one module"
        )
    return names


def optimizer_of(
    config: Config,
    model: torch.nn.Module,
    given: Optimizer | None,
    names: Mapping[int, str],
    *,
    in_pieces: str | None,
) -> tuple[Optimizer, LambdaLR | None]:
    """The optimizer of a model and its schedule: the configured ones, or a script's, which changes its rate itself.

    Args:
        config: the run's configuration.
        model: the model, as the trainer has left it.
        given: the script's optimizer; None for the configured one.
        names: what `names_in` has returned.
        in_pieces: as in `build_optimizer`.
    """
    if given is None:
        optimizer = build_optimizer(model, config.optimizer, in_pieces=in_pieces)
        return optimizer, build_scheduler(optimizer, config.scheduler, config.train.steps)
    weights = dict(model.named_parameters())
    for group in given.param_groups:
        now = [weights[names[id(weight)]] for weight in group["params"]]
        if given.state and any(one is not other for one, other in zip(now, group["params"], strict=True)):
            raise RequestError("run.wrap: the optimizer has state before its weights are sharded: wrap a new one")
        group["params"] = now
    return given, None
