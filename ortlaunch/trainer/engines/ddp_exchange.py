"""Lets DDP exchange gradients and buffers through the memory of the workers' machine instead of gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ortlaunch.trainer.shared_memory import SharedMemory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def exchange_by(memory: SharedMemory, module: DistributedDataParallel) -> None:
    """Makes DDP exchange its gradients and buffers by shared memory.

    Args:
        memory: the workers' memory.
        module: a model in DDP, before its first forward.
    """
    module._register_buffer_comm_hook(memory, _take_buffers, _BufferCommHookLocation.PRE_FORWARD)
    # torch compares a hook's annotations with its classes, and ours are texts.
    module.register_comm_hook(memory, lambda given, bucket: _average(given, bucket))


def _average(memory: SharedMemory, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's exchange of a bucket of gradients, by shared memory where that can take them.

    Args:
        memory: the workers' memory.
        bucket: the gradients; each becomes its average over the workers.
    """
    gradients = bucket.buffer()
    if not memory.can_take(gradients):
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)
    memory.sum_(gradients, scale=1 / memory.workers)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def _take_buffers(memory: SharedMemory, buffers: dict[str, torch.Tensor]) -> None:
    """DDP's exchange of buffers, before a forward: all workers take those of the first one.

    Args:
        memory: the workers' memory.
        buffers: the model's, by name.
    """
    whole = [one.contiguous() for one in buffers.values()]
    memory.take_first_workers_(whole)
    for buffer, taken in zip(buffers.values(), whole, strict=True):
        if taken is not buffer:
            buffer.copy_(taken)
