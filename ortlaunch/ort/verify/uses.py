"""Finds whether a forward uses values of Python that it changes: numbers, lengths of containers, unregistered tensors.

A counter often has no effect on the first batches (`if self.steps > 1000`). Two ways show that it will have one. A
number that notes its uses tells of comparisons. And a pass with values as they will be many steps later gives other
outputs.
"""

from __future__ import annotations

import builtins
import collections
import functools
import numbers
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LATER = 1000
"""Steps after which values are tried."""

_MOST = 10_000
"""Values that are looked at."""
_NOT_STATE = {"_parameters", "_buffers", "_modules", "training"}
_OPAQUE = (torch.nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_VALUES = (numbers.Number, torch.Tensor, numpy.ndarray)
_SIZED = (list, dict, set, collections.deque)


@dataclass(frozen=True)
class Place:
    """Where a module, or an object that it holds, keeps a value."""

    value: Any
    put: Callable[[Any], None]
    """Replaces the value there."""


@dataclass(frozen=True)
class Kept:
    """The values that the modules hold, and the lengths of their containers, by their place."""

    places: dict[tuple[Any, ...], Place]
    copies: dict[tuple[Any, ...], Any]
    """The values; copies of those that can change in place."""
    containers: dict[tuple[Any, ...], tuple[Any, int]]


def kept(model: torch.nn.Module) -> Kept:
    """Returns the values that a model's modules hold, tensors of the model aside."""
    found = Kept({}, {}, {})
    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _NOT_STATE and not key.endswith("_hooks"):
                _collect(found, (name, key), value, functools.partial(setattr, module, key), set())
    return found


def _collect(found: Kept, path: tuple[Any, ...], value: Any, put: Callable[[Any], None], above: set[int]) -> None:
    if isinstance(value, _VALUES) and not isinstance(value, bool | torch.nn.Parameter):
        if len(found.places) < _MOST:
            found.places[path] = Place(value, put)
            found.copies[path] = _copied(value)
        return
    if isinstance(value, (str, bytes, *_OPAQUE)) or value is None or id(value) in above:
        return
    if isinstance(value, _SIZED):
        found.containers[path] = value, len(value)
    for key, part, put_part in _parts(value, put):
        _collect(found, (*path, key), part, put_part, above | {id(value)})


def _parts(value: Any, put: Callable[[Any], None]) -> Iterator[tuple[Any, Any, Callable[[Any], None]]]:
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield key, part, functools.partial(value.__setitem__, key)
    elif isinstance(value, list | collections.deque):
        for index, part in enumerate(list(value)):
            yield index, part, functools.partial(value.__setitem__, index)
    elif type(value) is tuple:
        parts = list(value)

        def put_part(index: int, new: Any) -> None:
            parts[index] = new
            put(tuple(parts))

        for index, part in enumerate(value):
            yield index, part, functools.partial(put_part, index)
    elif not type(value).__module__.startswith("torch"):
        slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
        for name in (*slots, *getattr(value, "__dict__", ())):
            if hasattr(value, name):
                yield name, getattr(value, name), functools.partial(setattr, value, name)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, numpy.ndarray) else value


def is_later_different(before: Kept, after: Kept, forward: Callable[[], Any], differs: Callable[[Any], bool]) -> bool:
    """Whether a forward gives other outputs, or fails, when the values have changed on for `LATER` steps.

    Args:
        before: the values before a forward.
        after: those after it, which it finds now.
        forward: runs the model.
        differs: whether its outputs are others than with the values of now.
    """
    moved: list[Place] = []
    for path, place in after.places.items():
        later = _later(before.copies.get(path), after.copies[path])
        if later is not None:
            place.put(later)
            moved.append(place)
    if not moved:
        return False
    try:
        return differs(forward())
    except Exception:
        return True
    finally:
        for place in moved:
            place.put(place.value)


def _later(before: Any, after: Any) -> Any:
    """Returns the value that is reached with as much change in each further step; None where there is none."""
    if type(before) is not type(after) or getattr(before, "shape", None) != getattr(after, "shape", None):
        return None
    try:
        change = after - before
        moves = bool((change != 0).any()) if hasattr(change, "any") else change != 0
        return after + LATER * change if moves else None
    except Exception:
        # Of booleans, for example, there is no difference.
        return None


class _Number:
    """A number that notes that it is compared; what is computed from it notes it too."""

    uses: Uses


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


class Uses(TorchFunctionMode):
    """Finds whether forward compares numbers or lengths, or gives them to torch, also after computing with them.

    Attributes:
        found: whether it does.
    """

    def __init__(self, before: Kept, after: Kept) -> None:
        """
        Args:
            before: the values before a forward.
            after: those after it; what differs is watched.
        """
        super().__init__()
        self.found = False
        self._places = [
            (place, int(place.value) if isinstance(place.value, numbers.Integral) else float(place.value))
            for path, place in after.places.items()
            if isinstance(place.value, int | float | numpy.integer | numpy.floating)
            and (path not in before.copies or before.copies[path] != place.value)
        ]
        # They are kept alive, so that their ids stay unique.
        self._containers = {
            id(container): container
            for path, (container, length) in after.containers.items()
            if before.containers.get(path, (None, length))[1] != length
        }
        self._len = builtins.len

    def watched(self, value: float) -> Any:
        """Returns the number as one that notes its uses."""
        number = (_FLOAT if isinstance(value, float) else _INT)(value)
        number.uses = self
        return number

    def __enter__(self) -> Any:
        for place, value in self._places:
            place.put(self.watched(value))
        if self._containers:
            builtins.len = self._length
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        builtins.len = self._len
        super().__exit__(*error)
        for place, _ in self._places:
            place.put(place.value)

    def _length(self, value: Any, /) -> int:
        length = self._len(value)
        return self.watched(length) if id(value) in self._containers else length  # type: ignore[no-any-return]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, _Number) for leaf in pytree.tree_leaves((args, kwargs))):
            self.found = True
        return func(*args, **(kwargs or {}))
