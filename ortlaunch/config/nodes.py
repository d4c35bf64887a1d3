"""What the dataclasses of the configuration have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Node:
    """Base of a dataclass with ``eq=False, repr=False``, which compares and prints as one without these.

    ``dataclass`` writes and compiles both methods for each class. Every command makes the thirty classes of the schema,
    and that takes 4 ms of it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in _values(self))
        return f"{type(self).__qualname__}({values})"


def _values(node: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((one.name, getattr(node, one.name)) for one in fields(node))
