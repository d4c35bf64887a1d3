"""The model of glibc's malloc: what stays resident after blocks are freed."""

from __future__ import annotations

import pytest

from ortlaunch.estimate.heap import Heap
from ortlaunch.estimate.study import _of_allocator

MIB = 2**20


def test_a_block_above_the_threshold_is_returned_at_once() -> None:
    heap = Heap({})
    block = heap.allocate(100 * MIB)
    assert 100 * MIB <= heap.resident < 100.1 * MIB
    heap.free(block)
    assert heap.resident == 0


def test_freed_blocks_raise_the_threshold_and_the_next_ones_leave_holes() -> None:
    heap = Heap({})
    heap.free(heap.allocate(4 * MIB))
    blocks = [heap.allocate(2 * MIB) for _ in range(20)]
    for block in blocks[:-1]:
        heap.free(block)
    assert heap.resident >= 40 * MIB


def test_a_hole_is_used_again_by_a_smaller_block() -> None:
    heap = Heap({})
    heap.free(heap.allocate(4 * MIB))
    first, _second = heap.allocate(2 * MIB), heap.allocate(2 * MIB)
    before = heap.resident
    heap.free(first)
    heap.allocate(MIB)
    assert heap.resident == before


def test_the_end_of_the_heap_is_returned() -> None:
    heap = Heap({})
    heap.free(heap.allocate(4 * MIB))
    for block in [heap.allocate(3 * MIB) for _ in range(3)]:
        heap.free(block)
    assert heap.resident < MIB


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_MMAP_THRESHOLD_": "65536"},
        {"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.mmap_threshold=0x10000"},
        # Any setting keeps glibc from raising the threshold.
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_TOP_PAD_": "65536"},
    ],
)
def test_with_a_pinned_threshold_nothing_stays(variables: dict[str, str]) -> None:
    heap = Heap(variables)
    heap.free(heap.allocate(4 * MIB))
    for block in [heap.allocate(MIB) for _ in range(50)]:
        heap.free(block)
    assert heap.resident == 0


def test_blocks_of_one_size_in_turns_need_more_than_they_hold() -> None:
    heap = Heap({})
    heap.free(heap.allocate(32 * MIB))
    blocks = [heap.allocate(MIB) for _ in range(64)]
    for _ in range(20):
        for index in range(0, 64, 2):
            heap.free(blocks[index])
        for index in range(0, 64, 2):
            blocks[index] = heap.allocate(MIB)
    assert 64 * MIB < heap.resident < 128 * MIB


def test_without_mappings_the_largest_blocks_leave_holes() -> None:
    heap = Heap({"MALLOC_MMAP_MAX_": "0"})
    blocks = [heap.allocate(100 * MIB) for _ in range(3)]
    for block in blocks[:2]:
        heap.free(block)
    assert heap.resident > 300 * MIB


def test_a_heap_that_is_never_cut_keeps_its_end() -> None:
    heap = Heap({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"})
    heap.free(heap.allocate(100 * MIB))
    assert heap.resident > 100 * MIB


@pytest.mark.parametrize("text", ["", "64K", str(2**30)])
def test_a_setting_that_glibc_does_not_take_changes_nothing(text: str) -> None:
    heap, usual = Heap({"MALLOC_MMAP_THRESHOLD_": text}), Heap({})
    for one in (heap, usual):
        one.free(one.allocate(4 * MIB))
        one.allocate(2 * MIB)
        one.free(one.allocate(2 * MIB))
    assert heap.resident == usual.resident


def test_another_allocator_is_named() -> None:
    assert "LD_PRELOAD has jemalloc: " in _of_allocator({"LD_PRELOAD": "/lib/libother.so /lib/libjemalloc.so.2"})
    assert _of_allocator({"LD_PRELOAD": "/lib/libother.so"}) == _of_allocator({}) == ""


def test_a_block_that_nobody_writes_to_leaves_nothing_at_the_heaps_end() -> None:
    heap = Heap({})
    heap.free(heap.allocate(24 * MIB))
    heap.allocate(MIB)
    before = heap.resident
    heap.skip(8 * MIB)
    assert before <= heap.resident < before + MIB // 4
    # Later blocks find their place there.
    heap.allocate(8 * MIB)
    assert heap.resident < before + 9 * MIB
