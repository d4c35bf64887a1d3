"""Activation checkpointing for models that support it."""

from __future__ import annotations

from torch import nn

from ortlaunch.base.errors import RequestError


def recompute_activations(model: nn.Module) -> None:
    """Switches activation checkpointing on with the method that transformers models have for it.

    Raises:
        RequestError: the model has no such method, or does not support activation checkpointing.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    reason = f"{type(model).__name__} has no method gradient_checkpointing_enable"
    if enable is not None:
        try:
            # The reentrant kind computes no gradients if no input of a block requires one, and it does not work with
            # DDP's static graph.
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
        except ValueError as error:
            reason = str(error).strip().partition("\n")[0]
    raise RequestError(
        f"train.activation_checkpointing: {reason}: switch it off, or lower train.batch_size and raise "
        "train.grad_accumulation"
    )
