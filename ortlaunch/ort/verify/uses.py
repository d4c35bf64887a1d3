"""Finds whether a forward uses values of Python that it changes: numbers, lengths of containers, unregistered tensors.

A counter often has no effect on the first batches (`if self.steps > 1000`). Two ways show that it will have one. A
number that notes its uses tells of comparisons, and passes in which these come out the other way give other results.
And passes with values as they will be many steps later, round ones among them, give other results.
"""

from __future__ import annotations

import builtins
import collections
import functools
import numbers
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LATER = 1000
"""Steps after which values are tried."""
_ROUND = 15_120_000
"""Divisible by powers of ten, by 128 and by all numbers up to 10, for uses in every so many steps; exact in fp32."""
_ROUND_LENGTH = 1000
TIMES: tuple[int | None, ...] = (None, -2, -1, 0)
"""When values are tried: after `LATER` steps, and that many steps after counters are round."""

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


def is_later_different(before: Kept, after: Kept, when: int | None, differs: Callable[[], bool]) -> bool:
    """Whether a forward gives other results, or fails, when the values have changed on.

    Args:
        before: the values before a forward.
        after: those after it, which it finds now.
        when: one of `TIMES`.
        differs: runs the model; whether its results are others than with the values of now.
    """
    later = {path: _later(before.copies.get(path), after.copies[path], when) for path in after.places}
    moved = {path: value for path, value in later.items() if value is not None}
    if not moved:
        return False
    for path, value in moved.items():
        after.places[path].put(value)
    try:
        return differs()
    except Exception:
        return True
    finally:
        after.restore()


def _later(before: Any, after: Any, when: int | None) -> Any:
    """Returns the value that is reached with as much change in each further step; None where there is none."""
    if type(before) is not type(after) or getattr(before, "shape", None) != getattr(after, "shape", None):
        return None
    try:
        if isinstance(after, str | bytes):
            return _later_text(before, after, when)
        change = after - before
        moves = bool((change != 0).any()) if hasattr(change, "any") else change != 0
        if not moves:
            return None
        if when is not None:
            return _round(after, change, when)
        return after + LATER * change
    except Exception:
        # Of booleans, for example, there is no difference.
        return None


def _round(after: Any, change: Any, when: int) -> Any:
    """Returns a round value in the place of each whole number that changes."""
    moves = (change != 0) & (change % 1 == 0) & (after % 1 == 0)
    later = _ROUND + when * change
    if isinstance(after, torch.Tensor):
        return torch.where(moves, later, after).to(after.dtype)
    if isinstance(after, numpy.ndarray):
        return numpy.where(moves, later, after).astype(after.dtype)
    return type(after)(later) if moves else None


def _later_text(before: Any, after: Any, when: int | None) -> Any:
    """Returns a text that has grown on, or in which the numbers have."""
    growth = len(after) - len(before)
    if growth > 0 and (after.startswith(before) or after.endswith(before)):
        steps = LATER if when is None else max((_ROUND_LENGTH - len(after)) // growth, 0) + when
        at_end = after.startswith(before)
        part = after[len(before) :] if at_end else after[:growth]
        return after + part * max(steps, 0) if at_end else part * max(steps, 0) + after
    if before == after or not isinstance(after, str):
        return None
    olds, news = (re.findall(r"\d+", text) for text in (before, after))
    if len(olds) != len(news) or re.split(r"\d+", before) != re.split(r"\d+", after):
        return None
    pairs = zip(olds, news, strict=True)
    values = iter([_later(int(old), int(new), when) if old != new else int(new) for old, new in pairs])
    return re.sub(r"\d+", lambda _: str(next(values)), after)


class _Watched:
    """A number, or its text, that notes that it is compared; what is computed from it notes it too."""

    uses: Uses


def _noting(base: type, name: str) -> Callable[..., Any]:
    original = getattr(base, name)

    def method(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        if name in _COMPARISONS:
            return self.uses.compared(result, sys._getframe(1))
        return self.uses.watched(result) if type(result) in _KINDS else result

    return method


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__contains__"}
_COMPARISONS |= {"startswith", "endswith", "find", "index", "count"}
_ARITHMETIC = [
    f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for prefix in ("", "r")
]
_ARITHMETIC += ["__neg__", "__pos__", "__abs__", "__round__", "__str__", "__repr__", "__format__", "__getitem__"]


def _watched_kind(base: type) -> type:
    names = [name for name in (*_COMPARISONS, *_ARITHMETIC) if hasattr(base, name)]
    return type(f"_{base.__name__.title()}", (_Watched, base), {name: _noting(base, name) for name in names})


_KINDS: dict[type, type] = {base: _watched_kind(base) for base in (int, float, str)}

CodePlace = tuple[types.CodeType, int]
"""Code and an instruction in it."""


class Uses(TorchFunctionMode):
    """Finds whether forward compares numbers or lengths, or gives them to torch, also after computing with them.

    Attributes:
        found: whether it does, other than by comparisons that can be turned round.
        compared_at: where it compares, once in each call of the code.
        turned: the comparisons that come out the other way; all if None.
    """

    def __init__(self, before: Kept, after: Kept, turned: AbstractSet[CodePlace] | None = frozenset()) -> None:
        """
        Args:
            before: the values before a forward.
            after: those after it; what differs is watched.
            turned: see the attribute.
        """
        super().__init__()
        self.found = False
        self.compared_at: set[CodePlace] = set()
        self.turned = turned
        self._counts: collections.Counter[tuple[types.FrameType, int]] = collections.Counter()
        self._after = after
        self._places = [
            (place, _plain(place.value))
            for path, place in after.places.items()
            if isinstance(place.value, int | float | str | numpy.integer | numpy.floating)
            and (path not in before.copies or before.copies[path] != place.value)
        ]
        # They are kept alive, so that their ids stay unique.
        self._containers = {
            id(container): container
            for path, (container, length) in after.containers.items()
            if before.containers.get(path, (None, length))[1] != length
        }
        self._len = builtins.len

    def watched(self, value: Any) -> Any:
        """Returns the number, or the text, as one that notes its uses."""
        watched = _KINDS[type(value)](value)
        watched.uses = self
        return watched

    def compared(self, result: Any, frame: types.FrameType) -> Any:
        """Notes a comparison in a frame, and returns its result, or the opposite."""
        if result is NotImplemented:
            return result
        place = frame.f_code, frame.f_lasti
        self.compared_at.add(place)
        self._counts[frame, frame.f_lasti] += 1
        is_first = self._counts[frame, frame.f_lasti] == 1
        if type(result) is not bool or not (is_first or self.turned is None or self.turned):
            # A search, a hash, and a loop over comparisons have no opposite.
            self.found = True
            return result
        return not result if is_first and (self.turned is None or place in self.turned) else result

    def __enter__(self) -> Any:
        for place, value in self._places:
            place.put(self.watched(value))
        if self._containers:
            builtins.len = self._length
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        builtins.len = self._len
        super().__exit__(*error)
        self._counts.clear()
        self._after.restore()

    def _length(self, value: Any, /) -> int:
        length = self._len(value)
        return self.watched(length) if id(value) in self._containers else length  # type: ignore[no-any-return]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, _Watched) for leaf in pytree.tree_leaves((args, kwargs))):
            self.found = True
        return func(*args, **(kwargs or {}))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    return int(value) if isinstance(value, numbers.Integral) else float(value)
