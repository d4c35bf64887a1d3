"""What a step's blocks keep resident, and what its repetitions do to the allocator."""

from __future__ import annotations

import pytest

from ortlaunch.estimate.resident import Resident

MIB = 2**20
SIZES = [3 * MIB + 4096 * index for index in range(12)]


def written(resident: Resident, size: int) -> int:
    block = resident.allocate(size)
    resident.write(block, size)
    return block


def step(resident: Resident, before: list[int]) -> list[int]:
    """Allocates, and frees some of its own blocks and those that the step before has left."""
    blocks = [written(resident, size) for size in SIZES]
    resident.borrow(2 * MIB, is_exchanged=True)
    for block in [*blocks[::2], *before]:
        resident.free(block)
    return blocks[1::2]


def stepped(steps: int, repetitions: int) -> Resident:
    resident = Resident()
    resident.free(resident.allocate(32 * MIB))
    left = step(resident, [])
    for _ in range(steps - 2):
        left = step(resident, left)
    with resident.repeated(repetitions):
        left = step(resident, left)
    return resident


def test_a_repeated_step_does_what_the_step_itself_would() -> None:
    assert stepped(2, 10).now == stepped(12, 0).now
    assert stepped(2, 10).take_peaks() == stepped(12, 0).take_peaks()


def test_holes_grow_from_step_to_step() -> None:
    few, many = stepped(2, 1).take_peaks(), stepped(2, 18).take_peaks()
    assert sum(many) > sum(few)


def test_what_a_repeated_step_has_left_can_be_used_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    resident = Resident()
    left = step(resident, [])
    with resident.repeated(5):
        left = step(resident, left)
        once = resident.allocate(MIB)  # Only the first steps make it.
    for block in left:
        resident.free(block)
    assert max(resident.now) < MIB // 4
    resident.write(once, MIB)
    assert MIB <= min(resident.now) <= max(resident.now) < MIB + MIB // 4
    resident.free(once)


def test_models_differ_in_chance_alone() -> None:
    assert stepped(2, 18).now == stepped(2, 18).now
    assert len(set(stepped(2, 18).now)) > 1


def test_either_thread_takes_an_exchange_and_both_keep_its_memory() -> None:
    resident = Resident()
    resident.free(resident.allocate(24 * MIB))
    for _ in range(12):
        resident.borrow(8 * MIB, is_exchanged=True)
    assert all(one >= 16 * MIB for one in resident.now)


def test_a_tensor_without_a_write_is_a_part_of_a_repeated_step() -> None:
    once, often = Resident(), Resident()
    for one in (once, often):
        one.free(one.allocate(24 * MIB))
        written(one, MIB)
    with once.repeated(7):
        once.skip(8 * MIB)
    for _ in range(8):
        often.skip(8 * MIB)
    assert once.now == often.now
    assert max(often.now) > 8 * MIB  # By chance a small object is behind one, so that the heap cannot end before it.
