"""Spares what ZeRO 1 does on the CPU beside what it needs: copies of gradients, exchanges of single numbers, views.

DeepSpeed copies each gradient into a bucket, and after the exchange twice more: out of the bucket, which a further
bucket would overwrite, and into the flat gradient of the optimizer. If one bucket holds all gradients, it stays what it
is, and the flat gradient is a part of it. What a step computes is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LARGEST_BUCKET = 500_000_000
"""Elements of a bucket by DeepSpeed's default."""


def options(stage: int, elements: int, *, is_fp32: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """DeepSpeed's options with which ZeRO 1 and 2 need fewer copies.

    Args:
        stage: ZeRO's stage.
        elements: of all gradients together.
        is_fp32: whether the run trains in fp32.

    Returns:
        Keys for DeepSpeed's configuration, and keys for its ``zero_optimization``.
    """
    if stage not in (1, 2):
        return {}, {}
    # DeepSpeed makes a bucket in every step. Two gigabytes are always mapped anew, and their pages are too.
    zero: dict[str, Any] = {"reduce_bucket_size": max(1, min(elements, _LARGEST_BUCKET))}
    if stage == 2 or not is_fp32:
        return {}, zero
    # Otherwise the bucket is copied for the exchange, and a part of it copied back. Gradients are divided before the
    # exchange either way, so that the numbers are the same.
    return {"prescale_gradients": True}, {**zero, "reduce_scatter": False}


def spare_copies(optimizer: Any) -> None:
    """Makes DeepSpeed's optimizer of ZeRO 1 in fp32 on the CPU work without needless copies; leaves any other as it is.

    Args:
        optimizer: what ``deepspeed.initialize`` has put around the run's optimizer.
    """
    if not _can_spare(optimizer):
        return
    optimizer.copy_grads_in_partition = _nothing
    optimizer._get_preflattened_grad_partition = partial(_flat_gradient, optimizer)
    optimizer.scaled_global_norm = partial(_norm, optimizer)
    optimizer._update_model_bit16_weights = _unless_in_place(optimizer)


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
    from deepspeed.runtime.utils import combine_grad_norm_groups

    squares = torch.stack([_square(optimizer, group) for group in range(len(optimizer.bit16_groups))])
    dist.all_reduce(squares, group=optimizer.dp_process_group)
    norms = squares.pow(0.5)
    # DeepSpeed's mark of a group whose numbers are not finite.
    norms.masked_fill_(~norms.isfinite(), -1.0)
    combined: Tensor = combine_grad_norm_groups(list(norms))
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


def _nothing(*_: Any) -> None:
    return None
