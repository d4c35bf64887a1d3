"""Buffers that a model's forward moves, which ORTModule's graph cannot.

BatchNorm's are mended (`ort.mends.statistics`). Any other would move while the model is traced and never again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

_stale: WeakKeyDictionary[torch.nn.Module, list[str]] = WeakKeyDictionary()


def stale_buffers(wrapped: torch.nn.Module) -> list[str]:
    """Names of the buffers that eager training would move and this ORTModule does not.

    Known after the first training forward, in which the model is traced; empty before.
    """
    inner: Any = wrapped._torch_module
    return list(_stale.get(inner._original_module, ()))


@contextlib.contextmanager
def watched(model: torch.nn.Module) -> Iterator[None]:
    """Notes which buffers of `model` move within it, as in a training step, and puts them back."""
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
            # What took its place belongs to the trace.
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._buffers[last] = buffer
        with torch.no_grad():
            buffer.copy_(value)
    _stale[model] = moved


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num()) if left.is_floating_point() else torch.equal(left, right)
