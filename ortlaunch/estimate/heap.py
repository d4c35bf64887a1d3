"""A model of glibc's malloc, which decides how much more than its tensors a process on the CPU keeps resident.

A block above a threshold is a mapping of its own, which free returns to the system. All smaller blocks are parts of
one heap, whose end alone can be returned. Holes in the heap stay resident. With glibc's defaults, the threshold rises
to the largest block of at most 32 MiB that has been freed, so that most tensors of a training step come into the heap.

The rules are those of glibc 2.26 to 2.37 (malloc/malloc.c: ``_int_malloc``, ``_int_memalign``, ``_int_free``,
``sysmalloc``, ``systrim``); what happens among blocks of less than a kilobyte is simplified.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass

_LEAST_CHUNK, _HEADER, _GRAIN = 32, 8, 16
_ALIGNMENT = 64
"""torch asks for blocks at multiples of this."""
_AROUND = _ALIGNMENT + _LEAST_CHUNK + _GRAIN
"""How much longer a piece is searched for than an aligned block of it."""
_SMALL = 768
"""Bytes of these objects for a tensor."""
_TAKEN_AT_MOST = 128
_SHARE_TAKEN = 0.125
_SHARE_TAKEN_BESIDE = 0.25
_MOST_TAKEN = 30
_MOST_TAKEN_OF_BLOCK = 0.4
"""An aligned block leaves pieces of 32 to 128 bytes before and behind it. Objects of Python and C++ of these sizes take
this share of them, by chance, and glibc keeps some for such objects. Neighbours of a taken piece cannot be joined then,
and a hole in which a block was is too small for the next block of the same size. So holes grow from step to step. They
stop growing when so many pieces are taken, for the process and for each block, that one is given back for each further
one. A thread's own arena has few other pieces for its objects, so that they take more of these: the arenas of gloo's
threads came to 65 MiB under FSDP2, where the largest copy was 12 MiB, and to 80 MiB under ZeRO 3, where it was 28 MiB.
The numbers are fitted to the resident memory of training runs of 3 and 20 steps (docs/estimate.md)."""
_PAGE = 4096
_TOP_PAD = 128 * 1024
_TRIM_THRESHOLD = 128 * 1024
_MOST_THRESHOLD = 32 * 1024 * 1024
_SETTINGS = ("mmap_threshold", "mmap_max", "trim_threshold", "top_pad")
_NEVER = 2**64
"""A threshold that no block reaches. A negative setting counts from here, as an unsigned number does."""
_CONSOLIDATED = 64 * 1024
"""A freed piece from this size on lets glibc look whether the heap's end can be returned."""


@dataclass(slots=True)
class Block:
    """A block that was given out."""

    address: int
    size: int
    is_mapping: bool


class Thresholds:
    """glibc's settings, which all arenas of a process have in common."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """
        Args:
            variables: the environment of the process.
        """
        mapping, most_mappings, trim, pad = (_setting(variables, name) for name in _SETTINGS)
        if mapping is not None and mapping > _MOST_THRESHOLD:
            mapping = None  # glibc ignores it.
        # With any of them, glibc moves no threshold itself.
        self._is_fixed = any(one is not None for one in (mapping, most_mappings, trim, pad))
        self.mapping = _NEVER if most_mappings == 0 else 128 * 1024 if mapping is None else mapping
        """Blocks from this size on are mappings."""
        self.trim = _TRIM_THRESHOLD if trim is None else trim
        """The end of a heap is returned when it has more free bytes than this."""
        self.pad = _TOP_PAD if pad is None else pad
        """Bytes that a heap gets, or keeps, more than it needs."""

    def rise(self, size: int) -> None:
        """Lets them rise to a mapping that was freed."""
        if not self._is_fixed and self.mapping < size <= _MOST_THRESHOLD:
            self.mapping, self.trim = size, 2 * size


def _setting(variables: Mapping[str, str], name: str) -> int | None:
    """A setting of glibc's malloc by its variable or by ``GLIBC_TUNABLES``; None where it has its default."""
    tunables = dict(one.partition("=")[::2] for one in variables.get("GLIBC_TUNABLES", "").split(":"))
    text = tunables.get(f"glibc.malloc.{name}", variables.get(f"MALLOC_{name.upper()}_", ""))
    try:
        return int(text, 0) % _NEVER
    except ValueError:
        return None


class Heap:
    """One arena of glibc, for blocks as torch asks for them."""

    def __init__(
        self, variables: Mapping[str, str] | None = None, beside: Heap | None = None, *, seed: int = 0
    ) -> None:
        """
        Args:
            variables: the environment of the process; by default this one's. glibc reads its settings from it.
            beside: another arena of the same process.
            seed: of what small objects of the process do.
        """
        of_process = Thresholds(os.environ if variables is None else variables)
        self._thresholds: Thresholds = of_process if beside is None else beside._thresholds
        self._share_taken = _SHARE_TAKEN if beside is None else _SHARE_TAKEN_BESIDE
        self._top = 0
        """Where the free end of the heap begins."""
        self._end = 0
        self._reached = 0
        """The end of what was ever in use, and so is resident, since the heap's end was last returned."""
        self._free: list[tuple[int, int]] = []
        """Holes as (size, address), in this order."""
        self._by_begin: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self.resident = 0
        """Bytes that the process keeps in memory: mappings, and the heap with its holes."""
        self._chance = random.Random(seed)
        self._blocks = 0
        self._taken: list[tuple[int, int]] = []
        """Small pieces that objects have taken, as (address, length)."""
        self._small: list[int] = []
        """Addresses of freed small blocks, which glibc keeps for the next small ones and does not join."""

    def allocate(self, size: int) -> Block:
        """Gives out a block of `size` bytes at a multiple of 64, as ``posix_memalign`` does."""
        self._blocks += 1
        needed = max(_LEAST_CHUNK, -(-(size + _HEADER) // _GRAIN) * _GRAIN)
        searched = needed + _AROUND
        hole = bisect_left(self._free, (searched, 0))
        if hole < len(self._free):
            length, address = self._take(hole)
            return self._cut(address, length, needed)
        if self._end - self._top < searched + _LEAST_CHUNK:
            if searched >= self._thresholds.mapping:
                pages = _whole_pages(searched + _HEADER)
                self.resident += pages
                return Block(0, pages, is_mapping=True)
            self._end += _whole_pages(searched + self._thresholds.pad + _LEAST_CHUNK - (self._end - self._top))
        address, self._top = self._top, self._top + searched
        if self._top > self._reached:
            self._reach(self._top)
        return self._cut(address, searched, needed)

    def free(self, block: Block) -> None:
        """Takes a block back."""
        self._blocks -= 1
        if not block.is_mapping:
            self._release(block.address, block.size)
            return
        self.resident -= block.size
        self._thresholds.rise(block.size)

    def skip(self, size: int) -> None:
        """Gives out a block and takes it back before anything was written to it."""
        reached = self._reached
        self.free(self.allocate(size))
        if self._top <= reached < self._reached:
            self._reach(reached)

    def allocate_small(self) -> int:
        """Gives out a block for the objects that describe a tensor and its place in the graph of the backward."""
        if self._small:
            return self._small.pop()
        hole = bisect_left(self._free, (_SMALL, 0))
        if hole < len(self._free):
            length, address = self._take(hole)
            if length > _SMALL:
                self._release(address + _SMALL, length - _SMALL)
            return address
        if self._end - self._top < _SMALL + _LEAST_CHUNK:
            self._end += _whole_pages(_SMALL + self._thresholds.pad)
        address, self._top = self._top, self._top + _SMALL
        if self._top > self._reached:
            self._reach(self._top)
        return address

    def free_small(self, address: int) -> None:
        """Takes a small block back."""
        self._small.append(address)

    def _cut(self, address: int, length: int, needed: int) -> Block:
        """Makes a block of a piece of the heap: the aligned middle of it. What is before and behind becomes holes."""
        begin = address + (-(address + _GRAIN)) % _ALIGNMENT
        if 0 < begin - address < _LEAST_CHUNK:
            begin += _ALIGNMENT
        if begin > address:
            self._give_back(address, begin - address)
        behind = address + length - (begin + needed)
        if behind < _LEAST_CHUNK:
            needed += behind
        else:
            self._give_back(begin + needed, behind)
        return Block(begin, needed, is_mapping=False)

    def _give_back(self, address: int, length: int) -> None:
        """Makes a hole of what an aligned block leaves over, unless a small object of the process takes it at once."""
        if length <= _TAKEN_AT_MOST and self._chance.random() < self._share_taken:
            self._taken.append((address, length))
            if len(self._taken) <= _MOST_TAKEN + _MOST_TAKEN_OF_BLOCK * self._blocks:
                return
            address, length = self._given_back()
        self._release(address, length)

    def _given_back(self) -> tuple[int, int]:
        """One of the taken pieces, by chance, which is not taken any more."""
        index = self._chance.randrange(len(self._taken))
        self._taken[index], self._taken[-1] = self._taken[-1], self._taken[index]
        return self._taken.pop()

    def _release(self, address: int, length: int) -> None:
        """Adds a hole, joined with its neighbours. One at the heap's end becomes a part of the end."""
        before = self._by_end.get(address)
        if before is not None:
            joined = address - before
            self._take(bisect_left(self._free, (joined, before)))
            address, length = before, length + joined
        behind = self._by_begin.get(address + length)
        if behind is not None:
            self._take(bisect_left(self._free, (behind, address + length)))
            length += behind
        if address + length == self._top:
            self._top = address
        else:
            insort(self._free, (length, address))
            self._by_begin[address] = length
            self._by_end[address + length] = address
        if length >= _CONSOLIDATED and self._end - self._top >= self._thresholds.trim:
            kept = self._top + _whole_pages(self._thresholds.pad + _LEAST_CHUNK)
            self._end = min(self._end, kept)
            self._reach(min(self._reached, self._end))

    def _reach(self, end: int) -> None:
        self.resident += end - self._reached
        self._reached = end

    def _take(self, hole: int) -> tuple[int, int]:
        """Takes a hole by its place in the order; returns its size and address."""
        length, address = self._free.pop(hole)
        del self._by_begin[address]
        del self._by_end[address + length]
        return length, address


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
