"""Activation checkpointing of models that bring it."""

from __future__ import annotations

from torch import nn

from ortlaunch.base.errors import RequestError


def recompute_activations(model: nn.Module) -> None:
    """Switches activation checkpointing on, by the method that transformers models have for it.

    Raises:
        RequestError: the model has no such method, or cannot.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    reason = f"{type(model).__name__} has no method gradient_checkpointing_enable"
    if enable is not None:
        try:
            # The other kind loses the gradients of inputs that ask for none, and does not go with DDP's static graph.
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
        except ValueError as error:
            reason = str(error).strip().partition("\n")[0]
    raise RequestError(
        f"train.activation_checkpointing: {reason}: switch it off, or lower train.batch_size and raise "
        "train.grad_accumulation"
    )
