"""Keeps the train and eval mode of single modules, which ORTModule and the exporter set for the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def modes(model: torch.nn.Module) -> list[bool]:
    """Returns the mode of every module, in the order of ``model.modules()``."""
    return [module.training for module in model.modules()]


def set_modes(model: torch.nn.Module, flags: list[bool]) -> None:
    """Sets the modes that `modes` returned, on the same model or a copy of it."""
    for module, flag in zip(model.modules(), flags, strict=True):
        module.training = flag


@contextlib.contextmanager
def kept(model: torch.nn.Module) -> Iterator[list[bool]]:
    """Restores the modes at its end."""
    flags = modes(model)
    try:
        yield flags
    finally:
        set_modes(model, flags)
