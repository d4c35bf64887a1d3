"""Finds values of Python code that a model's forward changes and that its results depend on.

ONNX Runtime's graph has no Python. A counter by which a loss is weighted would keep the value that it had when the
graph was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortlaunch.ort.cache import key
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.nested import NamedTensors

_ROUNDING = 1e-6
"""Relative difference of outputs in two passes over the same batch up to which they are the same."""

_Attribute = tuple[torch.nn.Module, str]


@dataclass(frozen=True)
class PythonChange:
    """A value that each forward changes."""

    where: str
    before: str
    after: str
    is_of_module: bool
    """It is an attribute of a module, or within one."""


def python_change(
    model: torch.nn.Module, forward: Callable[..., NamedTensors], restore_buffers: Callable[[], None]
) -> PythonChange | None:
    """Returns a value of the model's Python code that each forward changes and that matters; None where there is none.

    A value matters if the outputs change with it, if forward compares it, or if forward gives it to torch. One that is
    only counted or kept does not. Nor does one that only the first forward changes, such as a table that it makes once.
    A number outside the modules (of a closure, a global) counts as one that matters. So does what one batch leaves for
    the next: a running mean that one batch alone does not move any more, the activations of the batch before.

    Args:
        model: the plain model.
        forward: runs it and returns its outputs; with the same batch and the same random numbers each time, or with
            another batch if its argument ``other`` is true.
        restore_buffers: gives the model the buffers of the start.
    """
    first = _after(model, forward, restore_buffers)
    second = _after(model, forward, restore_buffers)
    change = _difference("", first.facts, second.facts)
    if change is not None:
        if widest(second.outputs, first.outputs).exceeds(_ROUNDING) or not change.is_of_module:
            return change
        with _Uses(_changing_numbers(model, first.numbers)) as uses:
            forward()
        if uses.found:
            return change
    restore_buffers()
    forward(other=True)
    restore_buffers()
    if not widest(forward(), second.outputs).exceeds(_ROUNDING):
        return None
    restore_buffers()
    forward(other=True)
    change = _difference("", second.facts, _facts(model))
    return change or PythonChange("a value that the batch before decides", "one", "another", is_of_module=True)


@dataclass(frozen=True)
class _After:
    """What a forward has left."""

    outputs: NamedTensors
    facts: dict[str, Any]
    numbers: dict[_Attribute, float]


def _after(model: torch.nn.Module, forward: Callable[[], NamedTensors], restore_buffers: Callable[[], None]) -> _After:
    restore_buffers()
    outputs = forward()
    return _After(outputs, _facts(model), _numbers(model))


def _numbers(model: torch.nn.Module) -> dict[_Attribute, float]:
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def _changing_numbers(model: torch.nn.Module, before: dict[_Attribute, float]) -> list[_Attribute]:
    return [place for place, value in _numbers(model).items() if before.get(place) != value]


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    """Describes all that forward's code reaches; what has no description, such as a weak reference, is left out."""
    facts = key.describe_model(model, must_be_complete=False).facts
    return {"modules": facts["modules"], "reached": facts["reached"]}


def _difference(where: str, before: Any, after: Any) -> PythonChange | None:
    if not key.changed(before, after):
        return None
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        pairs = [(f"{where}.{name}", before[name], after[name]) for name in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(where, *pair) for pair in zip(before, after, strict=True)]
    else:
        return PythonChange(_name(where), _value(before), _value(after), where.startswith(".modules"))
    return next((found for found in (_difference(*pair) for pair in pairs) if found is not None), None)


def _name(where: str) -> str:
    return where.removeprefix(".modules").removeprefix(".reached").lstrip(".") or "the model"


def _value(described: Any) -> str:
    text = str(described)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _Number:
    """A number that notes that it is compared; what is computed from it notes it too."""

    uses: _Uses


def _noting(base: type, name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def method(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        if name in _COMPARISONS:
            self.uses.found = True
            return result
        return self.uses.watched(result) if type(result) in (int, float) else result

    return method


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__")
_ARITHMETIC = [
    f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for prefix in ("", "r")
]
_ARITHMETIC += ["__neg__", "__pos__", "__abs__", "__round__"]
_INT = type("_Int", (_Number, int), {name: _noting(int, name) for name in (*_COMPARISONS, *_ARITHMETIC)})
_FLOAT = type("_Float", (_Number, float), {name: _noting(float, name) for name in (*_COMPARISONS, *_ARITHMETIC)})


class _Uses(TorchFunctionMode):
    """Finds whether forward compares some numbers, or gives them to torch, also after computing with them.

    Attributes:
        found: whether it does.
    """

    def __init__(self, attributes: list[_Attribute]) -> None:
        super().__init__()
        self.found = False
        self._attributes = attributes

    def watched(self, value: float) -> Any:
        """Returns the number as one that notes its uses."""
        number = (_FLOAT if isinstance(value, float) else _INT)(value)
        number.uses = self
        return number

    def __enter__(self) -> Any:
        for module, name in self._attributes:
            setattr(module, name, self.watched(getattr(module, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for module, name in self._attributes:
            value = getattr(module, name)
            setattr(module, name, float(value) if isinstance(value, float) else int(value))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, _Number) for leaf in pytree.tree_leaves((args, kwargs))):
            self.found = True
        return func(*args, **(kwargs or {}))
