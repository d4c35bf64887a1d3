"""Converts a model's outputs, however nested, to tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

NamedTensors = dict[str, torch.Tensor]


def named_tensors(outputs: Any) -> NamedTensors:
    """Returns the tensors in `outputs` by path, such as ``logits`` or ``hidden.0``; a single tensor is ``output``."""
    return {path or "output": tensor.detach() for path, tensor in _leaves(outputs, "") if torch.is_tensor(tensor)}


def foreign_values(outputs: Any) -> dict[str, str]:
    """Returns the path and type of values that are neither tensors nor None, which ORTModule cannot return."""
    return {
        path or "output": type(value).__name__
        for path, value in _leaves(outputs, "")
        if value is not None and not torch.is_tensor(value)
    }


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield path, value
        return
    for name, entry in items:
        yield from _leaves(entry, f"{path}.{name}".lstrip("."))
