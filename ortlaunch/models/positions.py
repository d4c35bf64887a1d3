"""Spares the host a wait for the GPU in each forward of transformers' causal models.

Without a mask, transformers looks in each forward whether the positions are those of several sequences in one row of
the batch ("packed"), and reads the answer on the host, which waits until the GPU has computed it. This module gives the
answer where it is known: a model that is given no positions makes them itself.

The answer is given under all of these conditions, and the question goes to transformers' own function otherwise:

- The model is one of ortlaunch's own, so that transformers' code makes the positions. In all models of transformers
  5.17 and 5.23 they are consecutive then (``torch.arange``), or counted from an attention mask, with which the question
  is not asked. A model of the user's own may make other positions for a part from transformers.
- The batch gives the forward no ``position_ids``.
- All samples share one row of positions, as consecutive ones do, so they do not depend on what is in the batch.
- Nothing traces: transformers' function answers otherwise in a graph, which has to stay as it is.
- It is the thread and the time of such a forward. What runs again in the backward are a model's blocks, and masks are
  made outside them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch

_GIVEN = "position_ids"
_QUESTION = "find_packed_sequence_indices"
_ours: WeakSet[torch.nn.Module] = WeakSet()


class _Forward(threading.local):
    """What this thread computes now."""

    makes_positions = False
    """Whether it is the forward of a model that makes its positions itself."""


_now = _Forward()


def note_built(model: object) -> None:
    """Notes that a model was built by ortlaunch, so that its forward is transformers' code, or has no positions."""
    if isinstance(model, torch.nn.Module):
        _ours.add(model)


def makes_positions(model: torch.nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a plain model makes its positions itself where it is called with this batch."""
    makes = model in _ours and _GIVEN not in batch
    if makes:
        _spare_question()
    return makes


class MadeByModel:
    """The context of a forward whose model makes its positions itself."""

    def __enter__(self) -> None:
        self._before = _now.makes_positions
        _now.makes_positions = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _now.makes_positions = self._before


def _spare_question() -> None:
    """Puts the answer before transformers' function, once; does nothing in a version that has no such function."""
    if "transformers" not in sys.modules:
        return
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
        asked, is_tracing = getattr(masks, _QUESTION), masks.is_tracing
    except (ImportError, AttributeError):
        return
    if hasattr(asked, "_ortlaunch_original"):
        return

    @functools.wraps(asked)
    def answered(position_ids: torch.Tensor) -> torch.Tensor | None:
        # First whether something traces: torch.compile knows that, and then looks at no state of this module.
        if is_tracing(position_ids) or not _now.makes_positions or not _is_one_row(position_ids):
            return asked(position_ids)  # type: ignore[no-any-return]
        return None

    answered._ortlaunch_original = asked  # type: ignore[attr-defined]
    setattr(masks, _QUESTION, answered)


def _is_one_row(position_ids: torch.Tensor) -> bool:
    """Whether all samples have the same row, by the tensor's layout alone."""
    return position_ids.shape[0] == 1 or position_ids.stride(0) == 0
