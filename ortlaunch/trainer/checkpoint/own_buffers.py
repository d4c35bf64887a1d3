"""Saves and restores the buffers that an engine's state lacks, in the files of the workers.

An engine saves the first worker's buffers, as far as they are in the model's state dict. Two kinds are missing there:
those of the other workers, which differ where no trainer sends them the first one's (a queue of each worker's batches),
and those with ``persistent=False`` that training changes. Most buffers are neither, so hashes decide what is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ortlaunch.trainer import buffers
from ortlaunch.trainer.checkpoint.host import HostMemory, to_host

Saved = dict[str, dict[str, Any]]
"""Buffers by name: the ``value``, whether it is ``persistent``, and the ``shape`` that it was built with, which is None
for a buffer in the state dict and for one that forward registers."""


class OwnBuffers:
    """The buffers of one worker's model, with what they were when the model was built."""

    def __init__(self, model: nn.Module, in_state: Collection[str]) -> None:
        """
        Args:
            model: the plain model as it was built, before it is wrapped.
            in_state: the names in its state dict, which engines save.
        """
        self._model = model
        self._in_state = frozenset(in_state)
        outside = self._outside()
        self.shapes = {name: list(value.shape) for name, value in outside.items()}
        """The shape of each buffer that is in no state dict, as it was built."""
        self._built = {name: digest(value) for name, value in outside.items()}

    def copied(self, *, all_of_them: bool, shared: bool, memory: HostMemory) -> Saved:
        """Copies buffers to host memory.

        Args:
            all_of_them: whether those in the state dict are copied too.
            shared: as in `to_host`.
            memory: as in `to_host`.
        """
        persistent = set(_persistent(self._model))
        found = {
            name: {"value": value, "persistent": name in persistent, "shape": self.shapes.get(name)}
            for name, value in buffers.plain_buffers(self._model).items()
            if all_of_them or name not in self._in_state
        }
        copied: Saved = to_host(found, shared=shared, memory=memory)
        return copied

    def changed(self, copied: Saved, digests: dict[str, str]) -> Saved:
        """What the first worker saves: the buffers that are in no state dict and no longer what was built."""
        return {
            name: one
            for name, one in copied.items()
            if name not in self._in_state and digests[name] != self._built.get(name)
        }

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """At its end, the buffers that are in no state dict are again what they were at its beginning."""
        before = {name: value.detach().clone() for name, value in self._outside().items()}
        yield
        after = buffers.plain_buffers(self._model)
        for name, value in before.items():
            if name not in after or not torch.equal(after[name], value):
                buffers.put(self._model, name, value, persistent=False)

    def _outside(self) -> dict[str, torch.Tensor]:
        """The buffers that are in no state dict."""
        return {name: value for name, value in buffers.plain_buffers(self._model).items() if name not in self._in_state}

    def load(self, saved: Saved) -> None:
        """Gives the model's buffers what was saved of them."""
        for name, one in saved.items():
            buffers.put(self._model, name, one["value"], persistent=one["persistent"])


def differing(digests: dict[str, str], first: dict[str, str]) -> list[str]:
    """The names of a worker's buffers that differ from the first worker's.

    Args:
        digests: this worker's, by name.
        first: the first worker's.
    """
    return [name for name, mine in digests.items() if first.get(name) != mine]


def digest(value: torch.Tensor) -> str:
    """A hash of dtype, shape and bytes of a tensor."""
    state = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=16)
    state.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _persistent(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for leaf in module._buffers.keys() - module._non_persistent_buffers_set:
            yield f"{path}.{leaf}" if path else leaf
