"""Brings a training state to host memory: as a copy while training continues, else with what is there already."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]
_CopyTensor = Callable[[torch.Tensor], torch.Tensor]


class HostMemory:
    """Memory of a snapshot's copies, into which the next snapshot is copied again.

    The kernel gives a process new memory page by page and clears each page, which takes longer than the copy itself.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, deque[torch.Tensor]] = defaultdict(deque)
        """Copies of the snapshot before, by what a tensor must have in common with them."""
        self._taken: list[torch.Tensor] = []
        """Copies of the snapshot that is being made."""

    @contextlib.contextmanager
    def copying(self, *, keep: bool) -> Iterator[None]:
        """Within it a snapshot is made, which overwrites the snapshot before: that one must have been written.

        At the end, memory is let go for which the new snapshot has no tensor of the same shape and dtype.

        Args:
            keep: whether the memory is kept for a further snapshot. Otherwise it is gone with the last reference to
                the copies.
        """
        try:
            yield
        finally:
            taken, self._taken = self._taken, []
            self._free.clear()
            if keep:
                for copied in taken:
                    self._free[_kind(copied)].append(copied)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy, in memory of the snapshot before if it has a tensor of this kind left."""
        free = self._free.get(_kind(tensor))
        if free:
            copied = free.popleft()
            # The shards themselves: DTensor would plan the operation for every parameter.
            _local(copied).copy_(_local(tensor.detach()))
        else:
            copied = _new_copy(tensor)
        self._taken.append(copied)
        return copied


def to_host(tree: Any, *, shared: bool = False, memory: HostMemory | None = None) -> Any:
    """Copies a nested structure, with every tensor in host memory.

    Tensors that are the same memory in the original are one tensor in the copy. The copy of a view holds only the
    view's elements, not the rest of its storage.

    Args:
        tree: dictionaries, lists, tuples, tensors and plain values.
        shared: for an original that does not change any more: tensors that are whole in host memory stay where they
            are. Otherwise the copy shares nothing with the original.
        memory: what tensors are copied into, within its `copying`; None for new memory.
    """
    return _copy(tree, {}, shared, _new_copy if memory is None else memory.copy)


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
    tensor = _local(tensor)
    if tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())


def _copy(tree: Any, known: dict[_Key, torch.Tensor], shared: bool, copy_tensor: _CopyTensor) -> Any:
    if isinstance(tree, torch.Tensor):
        key = storage_key(tree)
        if key is None or key not in known:
            copied = tree.detach() if shared and _is_whole_on_host(tree) else copy_tensor(tree)
            if key is None:
                return copied
            known[key] = copied
        return known[key]
    if type(tree) in (dict, OrderedDict):
        return type(tree)((name, _copy(value, known, shared, copy_tensor)) for name, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_copy(value, known, shared, copy_tensor) for value in tree)
    return copy.deepcopy(tree)


def _is_whole_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or this worker's shard of it, is all of its storage in host memory, in order."""
    tensor = _local(tensor)
    is_all = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_all


def _new_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _kind(tensor: torch.Tensor) -> Hashable:
    """What two tensors have in common if one can be copied into the other's copy."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    return tensor.shape, tensor.dtype


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's shard of a sharded tensor; any other tensor is itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
