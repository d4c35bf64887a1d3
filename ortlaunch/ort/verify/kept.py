"""The values of Python that modules hold beside their parameters, and the way to put others in their place."""

from __future__ import annotations

import collections
import functools
import numbers
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

_MOST = 10_000
"""Values that are looked at."""
_NOT_STATE = {"_parameters", "_buffers", "_modules", "training"}
_OPAQUE = (torch.nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_VALUES = (numbers.Number, torch.Tensor, numpy.ndarray, str, bytes)
_SEQUENCES = (list, collections.deque)
_SIZED = (*_SEQUENCES, dict, set)


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
    contents: dict[tuple[Any, ...], Any]
    """Copies of the containers."""
    puts: dict[tuple[Any, ...], Callable[[Any], None]]
    """Replace the containers."""
    marks: dict[tuple[Any, ...], Any]
    """Flags, and what is None."""

    def restore(self) -> None:
        """Gives places and containers what they held."""
        for path, (container, _) in self.containers.items():
            self.puts[path](container)
            content = self.contents[path]
            if not _holds(container, content):
                container.clear()
                (container.extend if isinstance(container, _SEQUENCES) else container.update)(content)
        for path, place in self.places.items():
            if isinstance(place.value, torch.Tensor):
                with torch.no_grad():
                    place.value.copy_(self.copies[path])
            elif isinstance(place.value, numpy.ndarray):
                place.value[...] = self.copies[path]
            place.put(place.value)

    def changed(self, after: Kept) -> set[tuple[Any, ...]]:
        """Returns where other values are found later; all elements of a list are one place."""
        mine, others = self._facts(), after._facts()
        sequences = {
            path
            for one in (self, after)
            for path, (container, _) in one.containers.items()
            if isinstance(container, _SEQUENCES)
        }
        found = {path for path in {*mine, *others} if not _is_same(mine.get(path), others.get(path))}
        return {_collapsed(path, sequences) for path in found}

    def _facts(self) -> dict[tuple[Any, ...], Any]:
        lengths = {(*path, len): ("length", length) for path, (_, length) in self.containers.items()}
        return {**{path: ("value", copy) for path, copy in self.copies.items()}, **lengths, **self.marks}


def _content(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, _SEQUENCES) else set(container)


def _holds(container: Any, content: Any) -> bool:
    now = _content(container)
    if isinstance(now, set):
        return bool(now == content)
    olds, news = ([*one, *one.values()] if isinstance(one, dict) else one for one in (content, now))
    return len(olds) == len(news) and all(map(operator.is_, olds, news))


def _collapsed(path: tuple[Any, ...], sequences: set[tuple[Any, ...]]) -> tuple[Any, ...]:
    return next((path[:length] for length in range(len(path)) if path[:length] in sequences), path)


def _is_same(one: Any, other: Any) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return False
    one, other = one[1], other[1]
    equal: Any
    if isinstance(one, torch.Tensor | numpy.ndarray):
        if type(one) is not type(other) or one.shape != other.shape:
            return False
        equal = one == other
        return bool(equal.all())
    return bool(one == other)


def kept(model: torch.nn.Module) -> Kept:
    """Returns the values that a model's modules hold, tensors of the model aside."""
    found = Kept({}, {}, {}, {}, {}, {})
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
    if isinstance(value, bool) or value is None:
        found.marks[path] = ("mark", value)
    if isinstance(value, (bool, *_OPAQUE)) or value is None or id(value) in above:
        return
    if isinstance(value, _SIZED):
        found.containers[path] = value, len(value)
        found.contents[path] = _content(value)
        found.puts[path] = put
    for key, part, put_part in _parts(value, put):
        _collect(found, (*path, key), part, put_part, above | {id(value)})


def _parts(value: Any, put: Callable[[Any], None]) -> Iterator[tuple[Any, Any, Callable[[Any], None]]]:
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield key, part, functools.partial(value.__setitem__, key)
    elif isinstance(value, list | collections.deque):
        for index, part in enumerate(list(value)):
            yield index, part, functools.partial(value.__setitem__, index)
    elif isinstance(value, tuple):
        parts = list(value)
        made = getattr(type(value), "_make", type(value))

        def put_part(index: int, new: Any) -> None:
            parts[index] = new
            put(made(parts))

        for index, part in enumerate(value):
            yield index, part, functools.partial(put_part, index)
    elif not type(value).__module__.startswith("torch"):
        slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
        for name in (*slots, *getattr(value, "__dict__", ())):
            if hasattr(value, name):
                yield name, getattr(value, name), functools.partial(object.__setattr__, value, name)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, numpy.ndarray) else value
