"""Counts the memory of all tensors of a process while torch's operations run, on fake tensors as on real ones."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ortlaunch.estimate import workspace
from ortlaunch.estimate.device_memory import Block, DeviceMemory

_WITHOUT_CONTENT = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose result the system does not yet hold in memory: a page becomes resident when it is written."""


@dataclass
class _Entry:
    """One storage."""

    size: int
    written: int
    """Bytes of it that were written, from its beginning."""
    block: Block | None
    """Its block on a GPU."""


@dataclass(frozen=True)
class Use:
    """A use of memory, in bytes."""

    tensors: int
    """Bytes of tensors that were written, and of what operations hold while they run."""
    reserved: int
    """Bytes that the allocator of a GPU keeps for them; on the CPU those of the tensors."""


class Ledger(TorchDispatchMode):
    """Counts storages from the operation that makes them until nothing refers to them any more."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        """
        Args:
            on_gpu: whether the tensors stand for those on a GPU.
        """
        super().__init__()
        self._device = DeviceMemory() if on_gpu else None
        self._entries: dict[int, _Entry] = {}
        self._tensors = 0
        self._peak = 0
        self._answers = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts its results."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # The operations on its shards come here by themselves.
        if self._answers and func is torch.ops.aten._local_scalar_dense.default:
            return _made_up(args[0])
        if self._answers and func is torch.ops.aten.equal.default:
            return False  # As a worker's buffers and the first worker's: a copy of them is kept then.
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._device is None:
            out = workspace.completed(func, args, out)
        # A GPU's memory is taken when it is asked for.
        is_written = self._device is not None or func.overloadpacket.__name__ not in _WITHOUT_CONTENT or _fills_memory()
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                self._note(one, is_written=is_written)
        if func._schema.is_mutable:
            for one in _written(func, args, kwargs):
                self._note(one, is_written=True)
        if self._device is None:
            held = max(workspace.of_kernel(func, args, out), workspace.of_exchange(func, args, out))
            self._peak = max(self._peak, self._tensors + held)
        return out

    @property
    def now(self) -> int:
        """Bytes of tensors that are in use now."""
        return self._tensors

    def take_peak(self) -> Use:
        """The largest use since the last call, or since the beginning."""
        peak, self._peak = self._peak, self._tensors
        return Use(peak, peak if self._device is None else self._device.take_peak())

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Within it, a value that Python reads from a tensor is made up: true, 1.0 or 0. No tensors are equal.

        Elsewhere it is left to the tensors, and fake ones refuse. So a model that decides by its data is not traced
        along a path that its data would not take.
        """
        before, self._answers = self._answers, True
        try:
            yield
        finally:
            self._answers = before

    def adopt(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that no operation has made, and all of which was written."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._entries:
            entry = self._new(storage.nbytes())
            self._enter(storage, entry)
            self._write(entry, entry.size)

    @contextlib.contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """Within it, storages that are resized in place are counted too: FSDP frees gathered parameters so."""
        usual = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = usual(storage, size)
            if storage._cdata in self._entries:
                self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = usual  # type: ignore[method-assign]

    def _note(self, tensor: torch.Tensor, *, is_written: bool) -> None:
        if tensor.device.type == "meta":
            return  # It has no memory. DeepSpeed keeps the parameters' shapes so.
        if tensor.layout is not torch.strided:
            for one in _parts(tensor):
                self._note(one, is_written=is_written)
            return
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None:
            entry = self._new(storage.nbytes())
            self._enter(storage, entry)
            self._write(entry, entry.size if is_written else 0)
        elif is_written and entry.written < entry.size:
            self._write(entry, _extent(tensor))

    def _enter(self, storage: torch.UntypedStorage, entry: _Entry) -> None:
        self._entries[storage._cdata] = entry
        weakref.finalize(storage, self._drop, storage._cdata)

    def _new(self, size: int) -> _Entry:
        return _Entry(size, 0, None if self._device is None else self._device.allocate(size))

    def _write(self, entry: _Entry, extent: int) -> None:
        added = min(extent, entry.size) - entry.written
        if added > 0:
            entry.written += added
            self._tensors += added
            self._peak = max(self._peak, self._tensors)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries[storage._cdata]
        if entry.size != storage.nbytes():
            self._forget(entry)
            self._entries[storage._cdata] = self._new(storage.nbytes())

    def _drop(self, key: int) -> None:
        self._forget(self._entries.pop(key))

    def _forget(self, entry: _Entry) -> None:
        self._tensors -= entry.written
        if self._device is not None and entry.block is not None:
            self._device.free(entry.block)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that hold a sparse one; none of another layout, as oneDNN's own, which shows no memory."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _fills_memory() -> bool:
    """Whether torch writes to all memory that it gives out, as it does where algorithms have to be deterministic."""
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled() and bool(fills)


def _made_up(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    # Zero is a bad value for the step counter that an optimizer divides by, and a good one for a flag.
    return 1.0 if tensor.is_floating_point() else 0


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of a tensor's storage to the end of the tensor."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())
