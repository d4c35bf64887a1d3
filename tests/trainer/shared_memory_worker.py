"""One worker of `test_shared_memory`: exchanges drawn tensors with the others, and compares with gloo's gathering."""

from __future__ import annotations

import os
import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ortlaunch.trainer import shared_memory
from ortlaunch.trainer.shared_memory import SharedMemory
from ortlaunch.trainer.workers import Workers

CASES = 60
LARGEST = 700_000
"""More than two slots of either type."""


def main(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    workers = Workers(rank, world_size, torch.device("cpu"), 1)
    memory = connected(workers)
    sums(memory, rank)
    gatherings(memory, rank)
    print("exchanged")
    refused(workers)
    print("refused")
    differing(connected(workers), rank)
    ending(connected(workers), rank)


def connected(workers: Workers) -> SharedMemory:
    memory = shared_memory.connect(workers)
    assert memory is not None
    return memory


def drawn(chance: random.Random, size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """A tensor of each worker's own, some of them with numbers that are not finite."""
    generator = torch.Generator().manual_seed(chance.randrange(2**40) + rank)
    tensor = torch.randn(size, generator=generator, dtype=dtype) * 10 ** chance.uniform(-30, 30)
    if size and chance.random() < 0.3:
        tensor[chance.randrange(size)] = chance.choice([float("nan"), float("inf"), -float("inf")])
    return tensor


def everyones(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """All workers' tensors, by gloo."""
    found = [torch.empty(size, dtype=tensor.dtype) for size in sizes]
    dist.all_gather(found, tensor) if len(set(sizes)) == 1 else [
        dist.broadcast(one if rank != dist.get_rank() else tensor, rank) for rank, one in enumerate(found)
    ]
    found[dist.get_rank()] = tensor.clone()
    return found


def sums(memory: SharedMemory, rank: int) -> None:
    chance = random.Random(7)
    for case in range(CASES):
        size = chance.choice([1, 2, 63, chance.randrange(1000), chance.randrange(LARGEST), 262_144, 131_072, 0])
        dtype, scale = chance.choice([torch.float32, torch.float64]), chance.choice([1.0, 0.5, 1 / 3, 1 / 7])
        tensor = drawn(chance, size, dtype, rank)
        expected = torch.zeros(size, dtype=dtype)
        for position, one in enumerate(everyones(tensor, [size] * memory.workers)):
            expected = one * scale if position == 0 else expected + one * scale
        shaped = tensor.view(-1, 1) if size % 2 else tensor
        assert memory.can_take(shaped)
        memory.sum_(shaped, scale=scale)
        assert same(tensor, expected), (case, size, dtype, scale)


def gatherings(memory: SharedMemory, rank: int) -> None:
    chance = random.Random(8)
    for case in range(CASES // 2):
        dtype = chance.choice([torch.float32, torch.float64])
        equal = chance.random() < 0.5
        sizes = [chance.randrange(chance.choice([3, 1000, LARGEST])) for _ in range(memory.workers)]
        sizes = [sizes[0]] * memory.workers if equal else sizes
        parts = [drawn(chance, size, dtype, rank) for size in sizes]
        expected = everyones(parts[rank], sizes)
        memory.gather_(parts)
        assert all(map(same, parts, expected)), (case, sizes, dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same, but for those of what is not a number."""
    whole = torch.nan_to_num(one, nan=0.125), torch.nan_to_num(other, nan=0.125)
    return torch.equal(*whole) and torch.equal(one.isnan(), other.isnan())


def refused(workers: Workers) -> None:
    """On one worker the system gives no memory: all of them go by gloo, and connect again when it does."""
    usual = os.memfd_create

    def fail(_name: str) -> int:
        raise OSError("no memory for files")

    os.memfd_create = fail
    assert shared_memory.connect(workers) is None
    os.memfd_create = usual


def differing(memory: SharedMemory, rank: int) -> None:
    try:
        memory.sum_(torch.ones(10 + rank))
    except RuntimeError as error:
        print(error)
    dist.barrier()


def ending(memory: SharedMemory, rank: int) -> None:
    """The last worker ends; what the others say of it is on their standard output."""
    if rank == memory.workers - 1:
        os._exit(0)
    try:
        memory.sum_(torch.ones(10))
    except RuntimeError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1])
