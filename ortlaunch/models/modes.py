"""Evaluation of a model that trains, after which each of its modules has the mode that it had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and each of its modules back into its own mode afterwards.

    A module may be in evaluation mode while the model trains, such as a BatchNorm whose statistics are frozen.
    """
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        # A wrapper such as ORTModule has a mode beside those of its modules.
        model.train(was_training)
        for module, mode in modes:
            module.training = mode
