"""ortlaunch: a launcher for distributed PyTorch training with ORTModule, DeepSpeed, DDP and MLflow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ortlaunch.models.unwrapped import unwrapped

if TYPE_CHECKING:
    from ortlaunch.trainer.attached import Attached

__all__ = ["attach", "unwrapped"]
__version__ = "0.1.0"


def attach(*keys: str) -> Attached:
    """Makes a script's own loop a run: under ``ortlaunch KEYS -- train.py``, under torchrun, or alone.

    All workers call it, before they build what they train.

    Args:
        keys: defaults as on ortlaunch's command line, such as ``"train.steps=1000"``; those of the command line come
            before them.

    Raises:
        RequestError: a key is none, or the run cannot be gone on with.
    """
    # By name: the modules that it needs import this package for its version.
    run: Attached = import_module("ortlaunch.attaching").attached_run(keys)
    return run
