"""The model of torch's caching allocator, against what torch did on a GPU."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest

from ortlaunch.estimate.device_memory import Block, DeviceMemory

RECORDED = Path(__file__).parent / "recorded" / "gpt2_checkpointed_events.json.gz"
"""Every allocation of four steps of GPT-2 with activation checkpointing under DDP in bf16, on an H200 (torch 2.11): the
bytes and the stream of a block, or -1 and the number of the event whose block is freed; and what was reserved."""
MIB = 2**20


def test_a_recorded_training_reserves_what_it_did() -> None:
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    streams: dict[int, DeviceMemory] = {}
    blocks: dict[int, tuple[DeviceMemory, Block]] = {}
    for number, (size, which) in enumerate(recorded["events"]):
        if size < 0:
            memory, block = blocks.pop(which)
            memory.free(block)
        else:
            memory = streams.setdefault(which, DeviceMemory())
            blocks[number] = memory, memory.allocate(size)
    assert sum(memory.take_peak() for memory in streams.values()) == recorded["reserved"] == 9044 * MIB


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2),
        ([MIB], 2),
        ([MIB] * 3, 4),
        ([MIB + 1], 20),
        ([6 * MIB] * 3, 20),
        ([6 * MIB] * 4, 40),
        ([10 * MIB], 10),
        ([11 * MIB], 12),
        ([1, MIB + 1, 33 * MIB], 2 + 20 + 34),
    ],
)
def test_segments_have_torchs_sizes(sizes: list[int], reserved: int) -> None:
    memory = DeviceMemory()
    for size in sizes:
        memory.allocate(size)
    assert memory.now == reserved * MIB


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_neighbours_become_one_block_again(order: tuple[int, ...]) -> None:
    memory = DeviceMemory()
    blocks = [memory.allocate(6 * MIB) for _ in range(3)]
    for index in order:
        memory.free(blocks[index])
    memory.allocate(20 * MIB)
    assert memory.now == 20 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_what_is_reserved_is_never_less_than_what_is_in_use(seed: int) -> None:
    chance = random.Random(seed)
    memory = DeviceMemory()
    blocks: list[tuple[Block, int]] = []
    for _ in range(300):
        size = chance.choice((100, 5_000, 700_000, 3 * MIB, 40 * MIB))
        blocks.append((memory.allocate(size), size))
        if chance.random() < 0.4:
            memory.free(blocks.pop(chance.randrange(len(blocks)))[0])
        assert memory.now >= sum(size for _, size in blocks)
