"""Finds values of Python code that a model's forward changes and that its results depend on.

ONNX Runtime's graph has no Python. A counter by which a loss is weighted would keep the value that it had when the
graph was traced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.ort.cache import key
from ortlaunch.ort.cache.values import NOT_DESCRIBED, SEEN
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.uses import Uses, is_later_different, kept

_ROUNDING = 1e-6
"""Relative difference of outputs in two passes over the same batch up to which they are the same."""


@dataclass(frozen=True)
class PythonChange:
    """A value that each forward changes."""

    where: str
    before: str
    after: str
    is_of_module: bool
    """It is an attribute of a module, or within one."""
    is_advanced: bool = False
    """It is an iterator, and the like, which gives each forward its next value."""


def python_change(
    model: torch.nn.Module, forward: Callable[..., NamedTensors], restore_buffers: Callable[[], None]
) -> PythonChange | None:
    """Returns a value of the model's Python code that each forward changes and that matters; None where there is none.

    A value matters if the outputs change with it, now or as it will be many steps later, if forward compares it, or if
    forward gives it to torch. One that is only counted or kept does not. Nor does one that only the first forward
    changes, such as a table that it makes once. A value outside the modules (of a closure, a global, the environment)
    counts as one that matters, and so does an iterator that forward advances. So does what one batch leaves for the
    next: a running mean that one batch alone does not move any more, the activations of the batch before.

    Args:
        model: the plain model.
        forward: runs it and returns its outputs; with the same batch and the same random numbers each time, or with
            another batch if its argument ``other`` is true.
        restore_buffers: gives the model the buffers of the start.
    """
    first = _after(model, forward, restore_buffers)
    second = _after(model, forward, restore_buffers)
    changes = list(_differences("", first.facts, second.facts))
    if changes:
        if widest(second.outputs, first.outputs).exceeds(_ROUNDING):
            return changes[0]
        for change in changes:
            if not change.is_of_module or change.is_advanced:
                return change
        if _matters_later(model, forward, restore_buffers, second.outputs):
            return changes[0]
    restore_buffers()
    forward(other=True)
    restore_buffers()
    if not widest(forward(), second.outputs).exceeds(_ROUNDING):
        return None
    restore_buffers()
    forward(other=True)
    left = next(_differences("", second.facts, _facts(model)), None)
    return left or PythonChange("a value that the batch before decides", "one", "another", is_of_module=True)


def _matters_later(
    model: torch.nn.Module,
    forward: Callable[[], NamedTensors],
    restore_buffers: Callable[[], None],
    outputs: NamedTensors,
) -> bool:
    """Whether values of the modules that each forward changes without an effect on its outputs may have one later."""
    restore_buffers()
    before = kept(model)
    forward()
    after = kept(model)
    restore_buffers()
    with Uses(before, after) as uses:
        forward()
    if uses.found:
        return True
    restore_buffers()
    return is_later_different(before, after, forward, lambda later: widest(later, outputs).exceeds(_ROUNDING))


@dataclass(frozen=True)
class _After:
    """What a forward has left."""

    outputs: NamedTensors
    facts: dict[str, Any]


def _after(model: torch.nn.Module, forward: Callable[[], NamedTensors], restore_buffers: Callable[[], None]) -> _After:
    restore_buffers()
    outputs = forward()
    return _After(outputs, _facts(model))


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    """Describes all that forward's code reaches; what has no description, such as a weak reference, is left out."""
    facts = key.describe_model(model, must_be_complete=False).facts
    return {"modules": facts["modules"], "reached": facts["reached"], "environment": dict(os.environ)}


def _differences(where: str, before: Any, after: Any) -> Iterator[PythonChange]:
    if not key.changed(before, after):
        return
    if isinstance(before, list) and isinstance(after, list) and before[:1] == after[:1]:
        if before[:1] == [SEEN]:
            # It numbers what is described elsewhere.
            return
        if before[:1] == [NOT_DESCRIBED]:
            is_of_module = where.startswith(".modules")
            yield PythonChange(_name(where), *_values(before, after), is_of_module, is_advanced=True)
            return
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        pairs = [(f"{where}.{name}", before[name], after[name]) for name in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(where, *pair) for pair in zip(before, after, strict=True)]
    else:
        yield PythonChange(_name(where), *_values(before, after), where.startswith(".modules"))
        return
    for pair in pairs:
        yield from _differences(*pair)


def _name(where: str) -> str:
    return where.removeprefix(".modules").removeprefix(".reached").lstrip(".") or "the model"


def _values(before: Any, after: Any) -> tuple[str, str]:
    """Returns what a message shows of two descriptions: short values as they are, and of others nothing."""
    if all(isinstance(value, str) and len(value) <= 40 for value in (before, after)):
        return before, after
    return "one value", "another"
