"""Lets DeepSpeed's sums over the workers go through the memory of their machine instead of gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.trainer.shared_memory import SharedMemory


def sum_by(memory: SharedMemory | None) -> None:
    """Makes DeepSpeed add up gradients by shared memory, or by its own way again.

    Args:
        memory: the workers' memory; None for DeepSpeed's own way, which a run before in this process may have left.
    """
    from deepspeed.comm import comm

    # An attribute of the one object through which DeepSpeed calls all its exchanges.
    comm.cdb.__dict__.pop("all_reduce", None)
    if memory is not None:
        comm.cdb.all_reduce = partial(_all_reduce, memory, comm.cdb.all_reduce)


def _all_reduce(
    memory: SharedMemory, usual: Any, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    from deepspeed.comm import ReduceOp

    is_sum = op in (None, ReduceOp.SUM, dist.ReduceOp.SUM)
    if async_op or not is_sum or dist.get_world_size(group) != memory.workers or not memory.can_take(tensor):
        return usual(tensor, dist.ReduceOp.SUM if op is None else op, group, async_op)
    memory.sum_(tensor)
    return None
