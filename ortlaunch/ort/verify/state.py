"""Saves and restores a model's state and random numbers."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from ortlaunch.data.batch import Batch, mapped

_PLAIN = (bool, int, float, str, type(None))


class ModelState:
    """State that forward passes may change: buffers, and plain Python values such as counters; not the mode."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._values = [
            (module, {n: value for n, value in vars(module).items() if isinstance(value, _PLAIN) and n != "training"})
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Restores everything, and each buffer as the same tensor object."""
        self.restore_buffers()
        for module, values in self._values:
            vars(module).update(values)

    def restore_buffers(self) -> None:
        """Restores the buffers alone."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)

    def later(self) -> ModelState:
        """Returns this state with the values that the buffers have now; itself where none has moved."""
        if not self.moved_buffers():
            return self
        made = copy.copy(self)
        made._buffers = [
            (module, name, buffer, _later(module._buffers.get(name), value))
            for module, name, buffer, value in self._buffers
        ]
        return made

    def moved_buffers(self) -> set[str]:
        """Returns the names of the buffers that have changed since the state was saved."""
        now = dict(self._model.named_buffers())
        before = {
            id(module): {name: value for owner, name, _, value in self._buffers if owner is module}
            for module in self._model.modules()
        }
        moved = set()
        for name, buffer in now.items():
            path, _, leaf = name.rpartition(".")
            value = before[id(self._model.get_submodule(path))].get(leaf)
            if value is None or value.shape != buffer.shape or not torch.equal(value, buffer):
                moved.add(name)
        return moved


def _later(now: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a buffer's value of now, if it fits into the same memory."""
    if now is None or before is None or now.shape != before.shape or now.dtype != before.dtype:
        return before
    return before if torch.equal(now, before) else now.detach().clone()


def copied(batch: Batch) -> Batch:
    """Returns a copy of a batch for a model that may change its inputs."""
    return mapped(batch, lambda one: one.detach().clone().requires_grad_(one.requires_grad))


def in_fp64(batch: Batch) -> Batch:
    """Returns a batch whose floating-point tensors are fp64."""

    def exact(one: torch.Tensor) -> torch.Tensor:
        return one.detach().double().requires_grad_(one.requires_grad) if one.is_floating_point() else one

    return mapped(batch, exact)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restores the random state of Python, NumPy and torch; ONNX Runtime's own follows the next ``manual_seed``."""
    restore = saved_random_numbers()
    try:
        yield
    finally:
        restore()


def saved_random_numbers() -> Callable[[], None]:
    """Saves the random state of Python, NumPy and torch; returns the function that restores it."""
    python, array, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    devices: Any = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(array)
        torch.set_rng_state(cpu)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return restore


def random_state() -> tuple[Any, ...]:
    """Returns the states of Python's and NumPy's generators, to be compared."""
    name, words, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), name, numpy.asarray(words).tobytes(), rest


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
