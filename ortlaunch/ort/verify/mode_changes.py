"""Finds whether a model's own ``train()`` or ``eval()`` has left something else than before, which no graph follows.

ONNX Runtime's graph computes what forward did in the trace. A ``train()`` of the model's own may replace a function, a
module or a number that forward goes by, at any of its calls. So what forward reaches is described after each change of
the mode, and a description that differs from the last one of this mode asks for a comparison with PyTorch. A model
whose modules have PyTorch's own ``train()`` and ``eval()`` is not described: they set the mode alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.models import modes
from ortlaunch.ort.module.python_values import described


@dataclass(frozen=True)
class _Reached:
    """What forward reaches in one mode."""

    tensors: list[torch.Tensor]
    """The parameters and buffers themselves: another one in the place of one may look the same."""
    facts: dict[str, Any]


class ModeChanges:
    """What a model has reached in each mode when it was last compared with PyTorch."""

    def __init__(self) -> None:
        self._noted: dict[bool, _Reached] = {}

    def note(self, model: torch.nn.Module) -> None:
        """Notes what a model reaches whose results in its present mode are PyTorch's."""
        if modes.has_own(model):
            self._noted[model.training] = _reached(model)

    def found(self, model: torch.nn.Module) -> bool:
        """Whether a model reaches something else than at the last `note` in its present mode, if there was one."""
        before = self._noted.get(model.training)
        if before is None or not modes.has_own(model):
            return False
        now = _reached(model)
        if len(before.tensors) != len(now.tensors):
            return True
        pairs = zip(before.tensors, now.tensors, strict=True)
        return any(one is not other for one, other in pairs) or before.facts != now.facts


def _reached(model: torch.nn.Module) -> _Reached:
    return _Reached([*model.parameters(), *model.buffers()], described(model))
