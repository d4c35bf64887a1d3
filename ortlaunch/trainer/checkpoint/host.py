"""Brings a training state to host memory: as a copy while training continues, else with what is there already."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def to_host(tree: Any, *, shared: bool = False) -> Any:
    """Copies a nested structure, with every tensor in host memory.

    Tensors that are the same memory in the original are one tensor in the copy. The copy of a view holds only the
    view's elements, not the rest of its storage.

    Args:
        tree: dictionaries, lists, tuples, tensors and plain values.
        shared: for an original that does not change any more: tensors that are whole in host memory stay where they
            are. Otherwise the copy shares nothing with the original.
    """
    return _copy(tree, {}, shared)


def save_file(tree: Any, path: Path) -> None:
    """Writes a copy to a file.

    torch gets an open file instead of a path. With a path, torch's own writer would hide the disk's error.

    Raises:
        Exception: the file cannot be written. The chain of causes has the disk's error.
    """
    with path.open("wb") as file:
        torch.save(tree, file)


def storage_key(tensor: torch.Tensor) -> _Key | None:
    """A key that is equal for tensors that are the same memory; None for a tensor without memory.

    For a sharded tensor, the key is that of this worker's shard. The shard may be empty here but not on other workers.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())


def _copy(tree: Any, known: dict[_Key, torch.Tensor], shared: bool) -> Any:
    if isinstance(tree, torch.Tensor):
        key = storage_key(tree)
        if key is None or key not in known:
            stays = shared and _is_whole_on_host(tree)
            copied = tree.detach() if stays else tree.detach().to("cpu", copy=True).contiguous()
            if key is None:
                return copied
            known[key] = copied
        return known[key]
    if type(tree) in (dict, OrderedDict):
        return type(tree)((name, _copy(value, known, shared)) for name, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_copy(value, known, shared) for value in tree)
    return copy.deepcopy(tree)


def _is_whole_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or this worker's shard of it, is all of its storage in host memory, in order."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    is_all = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_all
