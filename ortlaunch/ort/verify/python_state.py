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

from ortlaunch.ort.module.python_values import NOT_DESCRIBED, SEEN, described
from ortlaunch.ort.module.python_values import changed as is_changed
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.kept import Kept, kept
from ortlaunch.ort.verify.later import TIMES, is_later_different
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.uses import CodePlace, Uses

_ROUNDING = 1e-6
"""Relative difference of outputs in two passes over the same batch up to which they are the same."""
_SEVERAL = 10.0
"""Times the difference of equal passes up to which others count as equal."""
EVALUATED = "evaluated "
"""What the names of outputs in evaluation mode begin with."""
_MOST_COMPARISONS = 8
"""Comparisons that are turned round, each in passes of its own."""


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
    model: torch.nn.Module,
    forward: Callable[..., NamedTensors],
    step: Callable[[], NamedTensors],
    restore_buffers: Callable[[], None],
) -> PythonChange | None:
    """Returns a value of the model's Python code that each forward changes and that matters; None where there is none.

    A value matters if the outputs or gradients change with it, now or as it will be many steps later, or with the
    outcome of a comparison of it, or if forward gives it to torch. One that is only counted, kept or logged does not.
    Nor does one that only the first forward changes, such as a table that it makes once. A value outside the modules
    (of a closure, a global, the environment) counts as one that matters, and so does an iterator that forward advances.
    So does what one batch leaves for the next: a running mean that one batch alone does not move any more, the
    activations of the batch before.

    Args:
        model: the plain model.
        forward: runs it and returns its outputs; with the same batch and the same random numbers each time, or with
            another batch if its argument ``other`` is true.
        step: runs it in the same way, then in evaluation mode, and returns its outputs and the gradients.
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
        if _matters_later(model, step, restore_buffers):
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
    model: torch.nn.Module, step: Callable[[], NamedTensors], restore_buffers: Callable[[], None]
) -> bool:
    """Whether values of the modules that each forward changes without an effect on its outputs may have one later."""
    restore_buffers()
    before = kept(model)
    expected = step()
    after = kept(model)
    restore_buffers()
    with Uses(before, after) as uses:
        again = step()
    if uses.found or len(uses.compared_at) > _MOST_COMPARISONS:
        return True
    # Sums on a GPU are not the same in each pass.
    noise = widest(*({name: one[name] for name in one if not name.startswith(EVALUATED)} for one in (again, expected)))
    rounding = max(_ROUNDING, _SEVERAL * (noise.error or 0.0))

    def is_other(results: NamedTensors) -> bool:
        return results.keys() != expected.keys() or widest(results, expected).exceeds(rounding)

    def differs() -> bool:
        restore_buffers()
        return is_other(step())

    if is_other(again):
        return True

    if any(is_later_different(before, after, when, differs) for when in TIMES):
        return True
    alone: list[set[CodePlace] | None] = [{place} for place in uses.compared_at]
    turns = [None, *alone] if alone else []
    changed = before.changed(after)
    return any(_matters_turned(model, before, after, turned, uses, changed, differs) for turned in turns)


def _matters_turned(
    model: torch.nn.Module,
    before: Kept,
    after: Kept,
    turned: set[CodePlace] | None,
    straight: Uses,
    changed: set[tuple[Any, ...]],
    differs: Callable[[], bool],
) -> bool:
    """Whether results change, now or in the next step, if comparisons come out the other way, or other values do."""
    outside = _outside(model)
    try:
        with Uses(before, after, turned) as uses:
            is_other = differs()
            uses.turned = set()
            is_other = is_other or uses.found or not uses.compared_at <= straight.compared_at or differs()
            new = after.changed(kept(model)) - changed
    except KeyboardInterrupt:
        raise
    except BaseException:
        # A model may end the program after so many steps.
        return True
    return is_other or bool(new) or is_changed(outside, _outside(model))


def _outside(model: torch.nn.Module) -> Any:
    facts = _facts(model)
    return [facts["reached"], facts["environment"]]


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
    facts = described(model)
    return {"modules": facts["modules"], "reached": facts["reached"], "environment": dict(os.environ)}


def _differences(where: str, before: Any, after: Any) -> Iterator[PythonChange]:
    if not is_changed(before, after):
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
