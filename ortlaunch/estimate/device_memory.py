"""A model of torch's caching allocator, which decides how much of a GPU's memory a process reserves.

The allocator asks CUDA for segments, cuts blocks from them, and keeps what is freed for later blocks. The rules are
those of torch 2.6 to 2.13 with their defaults (c10/cuda/CUDACachingAllocator.cpp: ``round_size``, ``get_free_block``,
``should_split``, ``get_allocation_size``, ``free_block``). All blocks are those of one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_GRAIN = 512
_SMALL = 2**20
"""Blocks up to this size are cut from segments of their own."""
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_LARGE = 10 * 2**20
"""Blocks from this size on get a segment of their own, if no free block has room for them."""
_LARGE_GRAIN = 2 * 2**20


@dataclass(slots=True, eq=False)
class Block:
    """A block, given out or free."""

    address: int
    size: int
    is_small: bool
    """Whether its segment is one of small blocks."""
    before: Block | None = None
    """The block before it in its segment."""
    behind: Block | None = None
    is_free: bool = False


class DeviceMemory:
    """The segments of a process on one GPU."""

    def __init__(self) -> None:
        self._free: dict[bool, list[tuple[int, int, Block]]] = {False: [], True: []}
        """Free blocks by whether they are small, as (size, address, block), in this order."""
        self.now = 0
        """Bytes that are reserved."""
        self._peak = 0

    def take_peak(self) -> int:
        """The most that was reserved since the last call, or since the beginning."""
        peak, self._peak = self._peak, self.now
        return peak

    def allocate(self, size: int) -> Block:
        """Gives out a block of so many bytes."""
        size = max(_GRAIN, -(-size // _GRAIN) * _GRAIN)
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect_left(free, size, key=lambda one: one[0])
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size)
        block.is_free = False
        rest = block.size - size
        if rest >= _GRAIN if is_small else rest > _SMALL:
            behind = Block(block.address + size, rest, is_small, block, block.behind, is_free=True)
            if block.behind is not None:
                block.behind.before = behind
            block.size, block.behind = size, behind
            insort(free, (behind.size, behind.address, behind), key=lambda one: one[:2])
        return block

    def _new_segment(self, size: int) -> Block:
        if size <= _SMALL:
            length = _SMALL_SEGMENT
        else:
            length = _LARGE_SEGMENT if size < _LARGE else -(-size // _LARGE_GRAIN) * _LARGE_GRAIN
        block = Block(self.now, length, size <= _SMALL)
        self.now += length
        self._peak = max(self._peak, self.now)
        return block

    def free(self, block: Block) -> None:
        """Takes a block back."""
        block.is_free = True
        before, behind = block.before, block.behind
        if before is not None and before.is_free:
            self._remove(before)
            before.size += block.size
            before.behind = behind
            if behind is not None:
                behind.before = before
            block = before
        if behind is not None and behind.is_free:
            self._remove(behind)
            block.size += behind.size
            block.behind = behind.behind
            if behind.behind is not None:
                behind.behind.before = block
        insort(self._free[block.is_small], (block.size, block.address, block), key=lambda one: one[:2])

    def _remove(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.size, block.address), key=lambda one: one[:2]))
