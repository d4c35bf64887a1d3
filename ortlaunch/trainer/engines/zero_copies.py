"""Spares what ZeRO 1 does on the CPU beside what it needs: copies of gradients and weights, exchanges, new views.

DeepSpeed copies each gradient into a bucket, and after the exchange twice more: out of the bucket, which a further
bucket would overwrite, and into the flat gradient of the optimizer. If one bucket holds all gradients, it stays what it
is, and the flat gradient is a part of it. What a step computes is the same.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ortlaunch.trainer.shared_memory import SharedMemory

_LARGEST_BUCKET = 500_000_000
"""Elements of a bucket by DeepSpeed's default."""
_LARGEST_IN_HEAP = 32 * 2**20
"""Bytes up to which glibc may keep a freed block in its heap, whose pages the next step finds again."""


def options(stage: int, elements: int, device: torch.device, *, is_fp32: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """DeepSpeed's options with which ZeRO 1 and 2 need fewer copies and less memory on the CPU.

    Args:
        stage: ZeRO's stage.
        elements: of all gradients together.
        device: the workers'; on a GPU DeepSpeed's own options stay.
        is_fp32: whether the run trains in fp32.

    Returns:
        Keys for DeepSpeed's configuration, and keys for its ``zero_optimization``.
    """
    if stage not in (1, 2) or device.type != "cpu":
        return {}, {}
    # DeepSpeed makes a bucket in every step. Two gigabytes are always mapped anew, and their pages are too.
    zero: dict[str, Any] = {"reduce_bucket_size": max(1, min(elements, _LARGEST_BUCKET))}
    if stage == 2 or not is_fp32:
        return {}, zero
    # Otherwise the bucket is copied for the exchange, and a part of it copied back. Gradients are divided before the
    # exchange either way, so that the numbers are the same.
    return {"prescale_gradients": True}, {**zero, "reduce_scatter": False}


def spare_copies(optimizer: Any, memory: SharedMemory | None = None) -> None:
    """Makes DeepSpeed's optimizer of ZeRO 1 in fp32 on the CPU work without needless copies; leaves any other as it is.

    Args:
        optimizer: what ``deepspeed.initialize`` has put around the run's optimizer.
        memory: the workers' memory, by which weights are gathered; None for gloo.
    """
    if not _can_spare(optimizer):
        return
    optimizer.copy_grads_in_partition = _nothing
    optimizer._get_preflattened_grad_partition = partial(_flat_gradient, optimizer)
    optimizer.scaled_global_norm = partial(_norm, optimizer)
    optimizer._update_model_bit16_weights = _unless_in_place(optimizer)
    optimizer.reduce_gradients = _without_hooks(optimizer)
    _gather_in_place(memory)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view of the elements of all tensors one after the other; None if they are not so in memory."""
    first = tensors[0].detach()
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        is_next = (
            tensor.untyped_storage()._cdata == storage
            and tensor.storage_offset() == end
            and tensor.dtype is first.dtype
            and tensor.is_contiguous()
        )
        if not is_next:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _can_spare(optimizer: Any) -> bool:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is not DeepSpeedZeroOptimizer or optimizer.partition_gradients:
        return False
    parameters = [parameter for group in optimizer.bit16_groups for parameter in group]
    return (
        all(one.dtype is torch.float32 and one.device.type == "cpu" for one in parameters)
        and optimizer.gradient_accumulation_dtype is torch.float32
        and optimizer.contiguous_gradients
        and not optimizer.cpu_offload
        and not optimizer.overlap_comm
        # Otherwise the bucket would be used a second time while gradients are in it.
        and sum(one.numel() for one in parameters) <= optimizer.reduce_bucket_size
    )


def _flat_gradient(optimizer: Any, group: int) -> Tensor | None:
    """This worker's part of a group's gradients, which the optimizer gets; None if DeepSpeed has to copy it together.

    The last part may have to be filled up.
    """
    flat = joined(optimizer.averaged_gradients[group])
    return flat if flat is not None and flat.numel() == optimizer.partition_size[group] else None


def _norm(optimizer: Any) -> Tensor:
    """DeepSpeed's norm of all gradients, for which it exchanges the square of each group by itself."""
    from deepspeed import comm
    from deepspeed.runtime.utils import combine_grad_norm_groups

    squares = torch.stack([_square(optimizer, group) for group in range(len(optimizer.bit16_groups))])
    comm.all_reduce(squares, group=optimizer.dp_process_group)
    combined: Tensor = combine_grad_norm_groups(list(squares.pow(0.5)))
    return combined


def _square(optimizer: Any, group: int) -> Tensor:
    """The square of the norm of this worker's part of a group's gradients, in the order and precision of DeepSpeed."""
    from deepspeed.runtime.zero.utils import get_norm_dtype

    parts = [part for part in optimizer.averaged_gradients[group] if not getattr(part, "_zero_padding", False)]
    # What comes after them fills the worker's part up.
    parts = parts[: len(optimizer.params_in_partition[group])]
    if not parts:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(part.detach().to(get_norm_dtype()), ord=2.0) for part in parts]
    return torch.stack(norms).pow(2.0).sum().float()


def _without_hooks(optimizer: Any) -> Callable[..., None]:
    """Removes what DeepSpeed calls at each weight's gradient, and returns its exchange of gradients for then.

    In ZeRO 1 these calls only make the bucket, which is filled after the backward. They also end a backward that was
    not begun by DeepSpeed's engine.
    """
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    reduce_gradients = optimizer.reduce_gradients

    def reduce(*args: Any, **kwargs: Any) -> None:
        optimizer.setup_buckets()
        for bucket in optimizer.ipg_buckets.values():
            for memory in bucket.buffer:
                _take_large_pages(memory)
        reduce_gradients(*args, **kwargs)

    return reduce


def _unless_in_place(optimizer: Any) -> Callable[[int], None]:
    """DeepSpeed's function that makes a group's weights views of its flat weights, for when one has another place.

    DeepSpeed calls it after every step, which has not moved them.
    """
    update = optimizer._update_model_bit16_weights
    weights = [list(group) for group in optimizer.bit16_groups]
    if not all(type(weight.data) is Tensor for group in weights for weight in group):
        # Fake tensors have no address.
        return update  # type: ignore[no-any-return]

    def places(group: int) -> list[int]:
        return [optimizer.bit16_groups_flat[group].data_ptr(), *(weight.data_ptr() for weight in weights[group])]

    known = [places(group) for group in range(len(weights))]

    def update_if_moved(group: int) -> None:
        if places(group) != known[group]:
            update(group)
            known[group] = places(group)

    return update_if_moved


def _gather_in_place(memory: SharedMemory | None) -> None:
    """Lets DeepSpeed's ZeRO 1 and 2 exchange fp32 weights on the CPU in place.

    Gloo's gathering goes through a copy of all weights, made anew in every step. The weights of each worker lie in one
    piece, and gloo's broadcast sends a piece from where it is and receives it where it belongs.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    # A run before in this process may have replaced it.
    original = getattr(stage_1_and_2.all_gather_dp_groups, "_ortlaunch_original", stage_1_and_2.all_gather_dp_groups)

    def gather(
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[dist.ProcessGroup],
        **rest: Any,
    ) -> None:
        if any(flat.device.type != "cpu" or flat.dtype is not torch.float32 for flat in groups_flat):
            original(groups_flat, partitioned_param_groups, dp_process_group, **rest)
            return
        if memory is not None and all(dist.get_world_size(group) == memory.workers for group in dp_process_group):
            for parts in partitioned_param_groups:
                memory.gather_(parts)
            return
        sent = [
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group, async_op=True)
            for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True)
            for rank, part in enumerate(parts)
        ]
        for work in filter(None, sent):
            work.wait()

    gather._ortlaunch_original = original  # type: ignore[attr-defined]
    stage_1_and_2.all_gather_dp_groups = gather


def _take_large_pages(memory: Tensor) -> None:
    """Asks Linux for large pages where a new bucket is a mapping of its own: small ones take longer than the copy.

    Copying 57 MB into a new bucket took 41 ms of processor time by small pages and 12 ms by large ones.
    """
    if type(memory) is not Tensor or memory.nbytes <= _LARGEST_IN_HEAP or not sys.platform.startswith("linux"):
        return
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # A system that refuses has small pages, which are right as well.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def _nothing(*_: Any) -> None:
    return None
