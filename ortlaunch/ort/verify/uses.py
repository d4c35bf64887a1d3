"""Finds whether a forward uses values of Python that it changes: numbers that note what is done with them.

A counter often has no effect on the first batches (`if self.steps > 1000`). A number that notes its uses tells of
comparisons, and passes in which these come out the other way give other results.
"""

from __future__ import annotations

import builtins
import collections
import numbers
import sys
import types
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import numpy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortlaunch.ort.verify.kept import Kept


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
