"""Finds buffers that a model's forward changes but ORTModule's graph does not.

BatchNorm's buffers are updated by `ort.mends.statistics`. All others would change only during the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

_stale: WeakKeyDictionary[torch.nn.Module, list[str]] = WeakKeyDictionary()


def stale_buffers(wrapped: torch.nn.Module) -> list[str]:
    """Returns the names of the buffers that eager training would change and this ORTModule does not.

    The result is known after the first training forward, in which the model is traced. Before that it is empty.
    """
    inner: Any = wrapped._torch_module
    return list(_stale.get(inner._original_module, ()))


@contextlib.contextmanager
def watched(model: torch.nn.Module) -> Iterator[None]:
    """Records which buffers of `model` change, as in a training step, and restores them."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    yield
    after = dict(model.named_buffers())
    moved = []
    for name, (buffer, value) in before.items():
        is_same = after.get(name) is buffer
        if is_same and _equal(buffer, value):
            continue
        moved.append(name)
        if not is_same:
            # The new buffer belongs to the trace.
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._buffers[last] = buffer
        with torch.no_grad():
            buffer.copy_(value)
    _stale[model] = moved


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num()) if left.is_floating_point() else torch.equal(left, right)
