"""Keeps what a model is beside its weights: the train and eval mode of single modules, buffers, plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))


def set_modes(model: torch.nn.Module, flags: list[bool]) -> None:
    """Sets the modes that `kept` gave, on the same model or a copy of it."""
    for module, flag in zip(model.modules(), flags, strict=True):
        module.training = flag


@contextlib.contextmanager
def kept(model: torch.nn.Module) -> Iterator[list[bool]]:
    """Restores the modes at its end; gives them in the order of ``model.modules()``."""
    modules = list(model.modules())
    flags = [module.training for module in modules]
    try:
        yield flags
    finally:
        # Forward may have added modules meanwhile.
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


@contextlib.contextmanager
def only_set(model: torch.nn.Module) -> Iterator[None]:
    """Lets ``train()`` and ``eval()`` of a model's modules set modes alone, where PyTorch would not call them at all.

    A model's own ``train()`` may count its calls, or put other weights in place.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if "train" in vars(cls)}
    own: list[tuple[Any, Any]] = [(cls, vars(cls)["train"]) for cls in classes - {torch.nn.Module}]
    try:
        for cls, _ in own:
            cls.train = torch.nn.Module.train
        yield
    finally:
        for cls, method in own:
            cls.train = method


def has_own(model: torch.nn.Module) -> bool:
    """Whether a change of the mode runs code of the model's own: a ``train()`` or ``eval()`` that is not PyTorch's."""
    plain = torch.nn.Module
    return any(
        type(module).train is not plain.train
        or type(module).eval is not plain.eval
        or not vars(module).keys().isdisjoint(("train", "eval"))
        for module in model.modules()
    )


@contextlib.contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and each of its modules back into its own mode afterwards.

    A module may be in evaluation mode while the model trains, such as a BatchNorm whose statistics are frozen.
    """
    was_training = model.training
    with kept(model):
        model.eval()
        try:
            yield
        finally:
            # A wrapper such as ORTModule, and a model with a train() of its own, do more than to set the mode.
            model.train(was_training)


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Restores what a forward may change: buffers, and values that modules hold, the mode of each among them."""
    before = [
        (
            module,
            [
                (name, one, None if one is None else (one.clone(), one._version))
                for name, one in module._buffers.items()
            ],
            {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)},
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, buffers, values in before:
            vars(module).update(values)
            for name, buffer, kept in buffers:
                module._buffers[name] = buffer
                # Not by its values, which tensors without content do not have.
                if buffer is not None and kept is not None and buffer._version != kept[1]:
                    with torch.no_grad():
                        buffer.copy_(kept[0])
