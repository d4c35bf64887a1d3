"""A model's buffers as they are on this worker, beside those of the first worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ortlaunch.models.strides import is_own


def plain_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers by name, without those that are no dense tensor (sparse, quantized, sharded)."""
    return {
        name: value
        for name, value in model.named_buffers()
        if value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
        and not isinstance(value, DTensor)
    }


def put(model: nn.Module, name: str, value: torch.Tensor, *, persistent: bool) -> None:
    """Gives a buffer a value, in place where the buffer has the value's shape and dtype.

    Args:
        model: the model.
        name: the buffer's name in the model. It may be missing, as one that forward registers is before the first step.
        value: on any device; a buffer that is made or replaced is on the device of the model's first parameter.
        persistent: whether a buffer that is made is a part of the state dict.
    """
    present = dict(model.named_buffers()).get(name)
    with torch.no_grad():
        if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype) and is_own(present):
            present.copy_(value)
            return
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        first = next(model.parameters(), value)
        here = value.to(first.device if present is None else present.device, copy=True)
        if leaf in module._buffers:
            module._buffers[leaf] = here
        else:
            module.register_buffer(leaf, here, persistent=persistent)


@torch.no_grad()
def take_first_workers(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
    """Gives all workers the first one's values of tensors; every worker must call it.

    Args:
        tensors: of any strides, also views of each other's memory.
        device: where the workers exchange; None for each tensor's own device.
    """
    for tensor in tensors:
        part = _once(tensor.detach())
        # A collective goes through the memory from end to end, where a view has other tensors, or other workers' rows.
        whole = part.to(device).contiguous()
        # As bytes, since gloo does not know every dtype.
        dist.broadcast(whole.view(-1).view(torch.uint8), 0)
        if whole is not part:
            part.copy_(whole)


@contextlib.contextmanager
def first_workers_buffers(model: nn.Module) -> Iterator[None]:
    """Within it all workers have the first one's buffers, which checkpoints and weights hold; every worker calls it.

    Afterwards a buffer that differed has this worker's value again: training may read it.
    """
    buffers = plain_buffers(model)
    # All of them first: one may be in the memory of another.
    before = {name: _once(buffer.detach()).clone() for name, buffer in buffers.items()}
    take_first_workers(buffers.values())
    own = {name: value for name, value in before.items() if not torch.equal(value, _once(buffers[name]))}
    del before
    try:
        yield
    finally:
        present = plain_buffers(model)
        for name, value in own.items():
            if present.get(name) is buffers[name]:
                _once(buffers[name].detach()).copy_(value)
            else:
                put(model, name, value.expand_as(buffers[name]), persistent=True)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetitions of its elements that `expand` makes."""
    for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
