"""Copies of a training state in host memory, so that training goes on while they are written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def to_host(tree: Any) -> Any:
    """A copy of a nested structure with every tensor in host memory; nothing in it is shared with the original.

    Tensors that are the same in the original are the same in the copy; a view leaves the rest of its storage behind.
    """
    return _copy(tree, {})


def save_file(tree: Any, path: Path) -> None:
    """Writes a copy to a file.

    Raises:
        Exception: with what the disk said in its chain; torch's own writer, given a path, only says that it failed.
    """
    with path.open("wb") as file:
        torch.save(tree, file)


def storage_key(tensor: torch.Tensor) -> _Key | None:
    """Equal for tensors that are one and the same memory; None for one without memory.

    Of a sharded tensor this worker's shard counts, which may be empty where other workers' are not.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())


def _copy(tree: Any, known: dict[_Key, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        key = storage_key(tree)
        if key is None or key not in known:
            copied = tree.detach().to("cpu", copy=True).contiguous()
            if key is None:
                return copied
            known[key] = copied
        return known[key]
    if type(tree) in (dict, OrderedDict):
        return type(tree)((name, _copy(value, known)) for name, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_copy(value, known) for value in tree)
    return copy.deepcopy(tree)
