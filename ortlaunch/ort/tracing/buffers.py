"""Moves the buffers that a model's forward changes, such as a running mean of its own or spectral_norm's vectors.

ORTModule's graph returns outputs and changes no buffers, so they would move during the trace and never again. Here the
final value of each buffer that the traced forward has changed becomes a further output of the graph, and is put into
the buffer after each forward. BatchNorm's buffers are updated by `ort.tracing.statistics`.

Buffers that are not saved with the model (``persistent=False``) are constants of the graph. If a trace has changed
some, the model is traced again with these as inputs. They are inputs of the graph for evaluation, too.

What the trace does not see, such as ``buffer.data = value``, is no output. The check at a run's start finds it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_moved: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""The buffers that the graphs of a plain model have moved."""


@dataclass
class Moved:
    """The buffers that a traced forward has changed."""

    names: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """What they are at its end, for the graph to return."""
    constants: list[str] = field(default_factory=list)
    """Further ones, which are constants of the graph."""


@contextlib.contextmanager
def collected(model: torch.nn.Module) -> Iterator[Moved]:
    """Collects the buffers that a forward of `model`, a plain model, changes while it is traced."""
    moved = Moved()
    saved = model.state_dict(keep_vars=True)
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    with _AssignsWhatIsWrittenOut():
        yield moved
    for name, buffer in model.named_buffers():
        if name not in before:
            continue
        same, version = before[name]
        is_as_before = buffer is same and buffer._version == version
        if is_as_before or buffer.dtype != same.dtype or not _same_size(buffer, same):
            continue
        if name not in saved:
            moved.constants.append(name)
        else:
            moved.names.append(name)
            moved.values.append(buffer.detach() if buffer.is_floating_point() else buffer.clone())


@contextlib.contextmanager
def as_inputs(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Makes buffers that are not saved inputs of the graphs that are traced meanwhile."""
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    # torch's exporter takes what `state_dict` returns.
    for module, name in owners:
        module._non_persistent_buffers_set.discard(name)
    try:
        yield
    finally:
        for module, name in owners:
            module._non_persistent_buffers_set.add(name)


def copied_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns copies of the current buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def moved_constants(model: torch.nn.Module) -> list[str]:
    """Returns the buffers that are not saved and that a graph of `model` has moved, so that other graphs read them."""
    there, saved = dict(model.named_buffers()), model.state_dict(keep_vars=True)
    return [name for name in there if name in _moved.get(model, ()) and name not in saved]


def update(model: torch.nn.Module, names: list[str], values: Sequence[Tensor]) -> None:
    """Gives buffers of `model` the values that the graph has returned."""
    _moved.setdefault(model, set()).update(names)
    _put(model, dict(zip(names, values, strict=True)))


@contextlib.contextmanager
def set_back(model: torch.nn.Module, before: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives buffers of `model` earlier values meanwhile, and then the present ones again.

    Args:
        model: a plain model.
        before: the earlier values, by the buffers' names.
    """
    now = {name: model.get_buffer(name).clone() for name in before}
    _put(model, before)
    try:
        yield
    finally:
        _put(model, now)


@torch.no_grad()
def _put(model: torch.nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        model.get_buffer(name).copy_(value)


@contextlib.contextmanager
def restored(model: torch.nn.Module) -> Iterator[None]:
    """Restores the buffers that change while `model` is traced, each as the same tensor object."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        # PyTorch may go on where an export has failed.
        _restore(model, before)


def _restore(model: torch.nn.Module, before: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Restores buffers, given as what they were and a copy of their values."""
    after = dict(model.named_buffers())
    for name, (buffer, value) in before.items():
        if after.get(name) is buffer and _equal(buffer, value):
            continue
        if after.get(name) is not buffer:
            # The new buffer belongs to the trace.
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._buffers[last] = buffer
        with torch.no_grad():
            buffer.copy_(value)


class _AssignsWhatIsWrittenOut(TorchFunctionMode):
    """Follows ``out=``, as in spectral_norm's power iteration: the exporter knows no operator that has it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = kwargs.get("out")
        if not isinstance(out, Tensor):
            return func(*args, **kwargs)
        result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
        # PyTorch gives `out` another size where it has to.
        return out.copy_(result) if _same_size(out, result) else func(*args, **kwargs)


def _same_size(left: Tensor, right: Tensor) -> bool:
    # In a trace sizes are tensors, and comparing them a decision.
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return left.shape == right.shape
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num()) if left.is_floating_point() else torch.equal(left, right)
