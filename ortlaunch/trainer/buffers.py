"""A model's buffers as they are on this worker, beside those of the first worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn


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
        if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype) and _is_own(present):
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


def take_first_workers_buffers(model: nn.Module) -> None:
    """Gives all workers the first one's buffers; every worker must call it."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


@contextlib.contextmanager
def first_workers_buffers(model: nn.Module) -> Iterator[None]:
    """Within it all workers have the first one's buffers, which checkpoints and weights hold; every worker calls it.

    Afterwards a buffer that differed has this worker's value again: training may read it.
    """
    own: dict[str, torch.Tensor] = {}
    for name, buffer in model.named_buffers():
        before = buffer.detach().clone()
        dist.broadcast(buffer, 0)
        if not torch.equal(before, buffer):
            own[name] = before
    try:
        yield
    finally:
        for name, value in own.items():
            put(model, name, value, persistent=True)


def _is_own(buffer: torch.Tensor) -> bool:
    """Whether each element has memory of its own, so that it can be written."""
    return all(step != 0 or size < 2 for size, step in zip(buffer.shape, buffer.stride(), strict=True))
