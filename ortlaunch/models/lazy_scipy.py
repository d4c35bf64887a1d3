"""Imports transformers' losses without scipy, whose optimizers take half a second of each worker's start."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType
from typing import Any

_SCIPY, _LOSSES = "scipy.optimize", "transformers.loss.loss_utils"


class _Later(ModuleType):
    """Stands for scipy's module: imports it when anything else than `linear_sum_assignment` is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_scipy(self), name)

    @staticmethod
    def linear_sum_assignment(*arguments: Any, **named: Any) -> Any:
        """As scipy's function, which is imported at the first call."""
        return _scipy(sys.modules.get(_SCIPY)).linear_sum_assignment(*arguments, **named)


def _scipy(stand_in: ModuleType | None) -> ModuleType:
    if isinstance(stand_in, _Later) and sys.modules.get(_SCIPY) is stand_in:
        del sys.modules[_SCIPY]
    return importlib.import_module(_SCIPY)


def import_losses() -> None:
    """Imports transformers' losses, as each of its models does, of which those of object detection would import scipy.

    A model with such a loss imports scipy when it computes it. The function is called before a model of transformers is
    imported; a later call does nothing.
    """
    if _SCIPY in sys.modules or _LOSSES in sys.modules:
        return
    stand_in = sys.modules[_SCIPY] = _Later(_SCIPY)
    try:
        # The model's own import says what is missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(_LOSSES)
    finally:
        if sys.modules.get(_SCIPY) is stand_in:
            del sys.modules[_SCIPY]
