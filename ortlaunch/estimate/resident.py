"""What a process keeps resident for the blocks that it asks of its allocator.

Where holes of a heap can be joined depends on small objects of the process that are not traced. So the same calls go to
several models of the allocator that differ in chance alone.
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, TypeVar

from ortlaunch.estimate.heap import Block, Heap

_CHANCES = 5
"""How many models of the allocator there are."""
_ARENAS = 3
"""The main thread's part of the heap, and those of the two threads in which gloo exchanges."""


Held = TypeVar("Held")
"""What a model knows of a block that it has given out."""


class Kind(Enum):
    """What is done with a block."""

    allocate = auto()
    map = auto()
    write = auto()
    free = auto()
    skip = auto()


class Call(NamedTuple):
    """A call of the allocator, a mapping beside it, the first write to bytes of a block, or a block without a write."""

    kind: Kind
    block: int
    size: int
    """Bytes of the block, or bytes that are written."""
    is_exchanged: bool = False
    """Whether one of gloo's threads makes it."""
    is_tensor: bool = False


@dataclass(slots=True)
class _Held:
    """A block that was given out."""

    heap: Heap | None
    """None for a mapping that the allocator did not make."""
    block: Block
    objects: int | None
    """Where the objects are that describe its tensor, if it is one's."""
    unwritten: int
    """Bytes that the system has not given yet: it gives a page of a mapping when the page is written."""


class Model(ABC, Generic[Held]):
    """A model of an allocator: the blocks that it has given out, and the bytes that it keeps for them."""

    now: int
    """Bytes that it keeps now."""
    peak: int
    """The most that it kept since this was last set back."""
    _held: dict[int, Held]

    def apply(self, call: Call) -> None:
        """Takes a call."""
        self._take((call,), self._held)

    def repeat(self, tape: Sequence[Call], successors: Mapping[int, int], times: int) -> None:
        """Takes the calls of a step so many times more.

        Args:
            tape: the calls.
            successors: for blocks that they free and have not allocated, the blocks of the same call that they leave.
            times: how often.
        """
        left = {block: self._held[block] for block in successors.values()}
        for _ in range(times):
            held = {block: left[successor] for block, successor in successors.items()}
            self._take(tape, held)
            left = {block: held[block] for block in successors.values()}
        self._held |= left

    @abstractmethod
    def _take(self, calls: Iterable[Call], held: dict[int, Held]) -> None:
        """Takes calls.

        Args:
            calls: what is done.
            held: the blocks in use, by the numbers in the calls.
        """


class _Process(Model[_Held]):
    """The heaps of a process on the CPU and the blocks in them."""

    def __init__(self, seed: int) -> None:
        main = Heap(seed=seed)
        self._heaps = [main, *(Heap(beside=main, seed=seed + index) for index in range(1, _ARENAS))]
        self._chance = random.Random(seed)
        self._held = {}
        self.now = 0
        self.peak = 0

    def _take(self, calls: Iterable[Call], held: dict[int, _Held]) -> None:
        # All tensors of many steps come through here, so it is written for speed.
        allocate, write, free, skip = Kind.allocate, Kind.write, Kind.free, Kind.skip
        main, *of_threads = self._heaps
        chance, now = self._chance, self.now
        for kind, number, size, is_exchanged, is_tensor in calls:
            if kind is allocate:
                # Whichever thread is free takes the next exchange.
                heap = chance.choice(of_threads) if is_exchanged else main
                now -= heap.resident
                block = heap.allocate(size)
                unwritten = size if block.is_mapping else 0
                held[number] = _Held(heap, block, heap.allocate_small() if is_tensor else None, unwritten)
                now += heap.resident - unwritten
            elif kind is write:
                one = held[number]
                if one.unwritten == 0:
                    continue
                written = min(size, one.unwritten)
                one.unwritten -= written
                now += written
            elif kind is free:
                now += _freed(held.pop(number))
                continue
            elif kind is skip:
                now -= main.resident
                main.skip(size)
                now += main.resident
            else:
                held[number] = _Held(None, Block(0, size, is_mapping=True), None, 0)
                now += size
            if now > self.peak:
                self.peak = now
        self.now = now


def _freed(one: _Held) -> int:
    """Takes a block back; returns the bytes that the process keeps more."""
    heap = one.heap
    if heap is None:
        return -one.block.size
    before = heap.resident
    heap.free(one.block)
    if one.objects is not None:
        heap.free_small(one.objects)
    return heap.resident - before + one.unwritten


class Resident:
    """Counts what blocks keep resident. Blocks have numbers."""

    def __init__(self, models: Sequence[Model[Any]] | None = None) -> None:
        """
        Args:
            models: of the allocator; by default of a process on the CPU.
        """
        self._models = [_Process(_ARENAS * index) for index in range(_CHANCES)] if models is None else models
        self._count = 0
        self._sizes: dict[int, int] = {}
        self._tape: list[Call] | None = None

    def allocate(self, size: int) -> int:
        """Returns the number of a block of a tensor in which nothing was written."""
        return self._allocate(size, is_tensor=True)

    def map(self, size: int) -> int:
        """Returns the number of a block in a file that is mapped into memory, all of which was read."""
        block = self._new_number()
        self._sizes[block] = size
        self._apply(Call(Kind.map, block, size))
        return block

    def borrow(self, size: int, *, is_exchanged: bool = False) -> None:
        """Notes that an operation holds so many bytes only while it runs.

        Args:
            size: the bytes.
            is_exchanged: whether one of gloo's threads holds them, in its part of the heap.
        """
        block = self._allocate(size, is_exchanged=is_exchanged)
        self.write(block, size)
        self.free(block)

    def skip(self, size: int) -> None:
        """Notes that an operation makes a tensor and frees it without a write."""
        self._apply(Call(Kind.skip, self._new_number(), size))

    def write(self, block: int, size: int) -> None:
        """Notes that so many bytes of a block are written for the first time."""
        self._apply(Call(Kind.write, block, size))

    def free(self, block: int) -> None:
        """Takes a block back."""
        self._apply(Call(Kind.free, block, self._sizes.pop(block)))

    @property
    def now(self) -> list[int]:
        """Bytes that are resident by each model."""
        return [one.now for one in self._models]

    def take_peaks(self) -> list[int]:
        """The most that was resident by each model since the last call, or since the beginning."""
        peaks = [one.peak for one in self._models]
        for one in self._models:
            one.peak = one.now
        return peaks

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Repeats the calls of a step, which are taken within it, after it."""
        tape = self._tape = []
        try:
            yield
        finally:
            self._tape = None
        self._repeat(tape, times)

    def _repeat(self, tape: list[Call], times: int) -> None:
        allocated = {call.block: call.size for call in tape if call.kind is Kind.allocate}
        freed = {call.block: call.size for call in tape if call.kind is Kind.free}
        left = {block: size for block, size in allocated.items() if block not in freed}
        before = {block: size for block, size in freed.items() if block not in allocated}
        successors = _of_same_size(before, left)
        once = left.keys() - set(successors.values())
        again = (allocated.keys() - once) | successors.keys()
        tape = [call for call in tape if call.block in again or call.kind is Kind.skip]
        for one in self._models:
            one.repeat(tape, successors, times)

    def _allocate(self, size: int, *, is_exchanged: bool = False, is_tensor: bool = False) -> int:
        block = self._new_number()
        self._sizes[block] = size
        self._apply(Call(Kind.allocate, block, size, is_exchanged, is_tensor))
        return block

    def _new_number(self) -> int:
        self._count += 1
        return self._count

    def _apply(self, call: Call) -> None:
        if self._tape is not None:
            self._tape.append(call)
        for one in self._models:
            one.apply(call)


def _of_same_size(before: dict[int, int], left: dict[int, int]) -> dict[int, int]:
    """For blocks that a step frees, the blocks of the same size that it leaves to be freed by the next step."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for block in sorted(left, reverse=True):
        by_size[left[block]].append(block)
    return {block: by_size[size].pop() for block, size in sorted(before.items()) if by_size[size]}
