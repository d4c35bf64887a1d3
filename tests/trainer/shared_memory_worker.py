"""One worker of `test_shared_memory`: exchanges drawn tensors with the others, and compares with gloo's gathering."""

from __future__ import annotations

import os
import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ortlaunch.trainer import shared_memory
from ortlaunch.trainer.engines import ddp_exchange
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
    copies(memory, rank)
    in_ddp(memory, rank)
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
    found[dist.get_rank()] = tensor.clone()
    for rank, one in enumerate(found):
        dist.broadcast(one, rank)
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


def copies(memory: SharedMemory, rank: int) -> None:
    """Tensors of several types, among them numbers without a dimension, empty ones and some larger than a slot."""
    chance = random.Random(9)
    kinds = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    for case in range(CASES // 4):
        sizes = [
            chance.choice([(), (0,), (chance.randrange(50), 3), (chance.randrange(LARGEST),)])
            for _ in range(chance.randrange(1, 12))
        ]
        tensors = [torch.full(size, rank + 1).to(chance.choice(kinds)) for size in sizes]
        for one in tensors:
            if one.numel() > 1 and one.dtype is not torch.bool:
                one.view(-1)[one.numel() // 2] = rank + chance.randrange(9)
        expected = [one.clone() for one in tensors]
        for one in expected:
            dist.broadcast(one.view(-1).view(torch.uint8), 0)
        memory.take_first_workers_(tensors)
        assert all(map(torch.equal, tensors, expected)), (case, sizes)


class Remembers(torch.nn.Module):
    """Reads buffers that each batch changes: statistics, a number, one in another order, one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.linear = torch.nn.Linear(6, 3)
        self.register_buffer("turned", torch.zeros(3, 6).t())
        self.register_buffer("replaced", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.linear(self.norm(x) + self.replaced + self.turned.sum(1) * self.norm.running_mean)
        with torch.no_grad():
            self.turned.add_(x[:3].t())
            self.replaced = self.replaced * 0.5 + x.mean(0)
        return read


def in_ddp(memory: SharedMemory, rank: int) -> None:
    """Three backwards of a model in DDP with our hooks and with none."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        module = DistributedDataParallel(Remembers())
        if ours:
            ddp_exchange.exchange_by(memory, module)
        chance = torch.Generator().manual_seed(rank)
        for _ in range(3):
            module(torch.randn(5, 6, generator=chance)).square().sum().backward()
        found.append([*(one.grad for one in module.parameters()), *module.buffers()])
    # With three workers gloo adds up in another order.
    assert all(torch.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in zip(*found, strict=True))
    assert memory.workers > 2 or all(map(torch.equal, *found))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all numbers are the same; what is not a number is the same as another one."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


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
