"""From a wrapped model to the user's own."""

from __future__ import annotations

from typing import Any

_WRAPPERS = ("DistributedDataParallel", "DeepSpeedEngine", "ORTModule", "Noted", "AttachedModel")
"""Classes whose `module` is what they wrap; FSDP and torch.compile leave the model in place."""


def unwrapped(model: Any) -> Any:
    """The model that was built, inside DDP, DeepSpeed, ORTModule or a compiled module.

    Args:
        model: the wrapped model, as a step or a hook gets it.
    """
    while True:
        if any(cls.__name__ in _WRAPPERS for cls in type(model).__mro__):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model
