"""The bounds of numeric keys: each is declared with its field in the schema and checked before a run begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.base.errors import RequestError

LARGEST = 2**63 - 1
"""The largest whole number that PyTorch, MLflow and C programs take. No key may be larger."""
MOST_PROCESSES = 4096
"""The most processes, threads or devices of one machine. A larger number is a slip, and would exhaust the machine."""
MOST_NODES = 100_000
_METADATA = "bounds"
_LISTED = 5
"""Up to this number of allowed values, a message lists them instead of the ends of their range."""


@dataclass(frozen=True)
class Bounds:
    """The numbers that a key takes. An end that is None is open; NaN and infinity are never taken."""

    least: float | None = None
    above: float | None = None
    """Values must be greater than this."""
    most: float | None = None
    below: float | None = None
    """Values must be less than this."""
    hint: str = ""
    """What to do instead, for the message."""

    def holds(self, value: float) -> bool:
        """Whether a number lies within the bounds."""
        return (
            is_usable(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """The bounds as text: ``at least 1``; empty if both ends are open."""
        if isinstance(self.least, int) and isinstance(self.most, int) and self.most - self.least < _LISTED:
            *others, last = (str(number) for number in range(self.least, self.most + 1))
            return f"{', '.join(others)} or {last}" if others else last
        lower = (("at least", self.least), ("greater than", self.above))
        upper = (("at most", self.most), ("less than", self.below))
        return " and ".join(f"{words} {_plain(end)}" for words, end in lower + upper if end is not None)


def number(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> Any:
    """A numeric field of the schema with the bounds of its values."""
    bounds = Bounds(least, above, most, below, hint)
    return field(default=default, metadata=with_bounds({}, bounds))


def _plain(end: float) -> str:
    """An end as text: 1, not 1.0."""
    return str(end) if isinstance(end, int) else f"{end:g}"


def with_bounds(metadata: dict[str, Any], bounds: Bounds | None) -> dict[str, Any]:
    """A field's metadata with its bounds, for a field that needs more than `number`. They hold for a list's items."""
    return metadata if bounds is None else metadata | {_METADATA: bounds}


def bounds_of(node: type[Any], name: str) -> Bounds | None:
    """The bounds of a field; None if it has none. An option that only changes a default keeps its group's bounds."""
    for base in node.__mro__:
        declared = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if declared is not None and _METADATA in declared.metadata:
            found: Bounds = declared.metadata[_METADATA]
            return found
    return None


def is_usable(value: float) -> bool:
    """Whether a key may have this number at all: it is finite, and as a whole number not too large."""
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= LARGEST


def check_numbers(node: Any, prefix: str = "") -> None:
    """Checks every number in a node of the configuration, also those in free dictionaries and lists.

    Args:
        node: an instance of a dataclass of the schema.
        prefix: the dotted name of the node with a dot at its end; empty for the whole configuration.

    Raises:
        RequestError: a number is not finite or out of its field's bounds.
    """
    for one in dataclasses.fields(node):
        value, key = getattr(node, one.name), f"{prefix}{one.name}"
        if dataclasses.is_dataclass(value):
            check_numbers(value, f"{key}.")
            continue
        if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for index, item in enumerate(value):
                check_numbers(item, f"{key}.{index}.")
            continue
        bounds = bounds_of(type(node), one.name) or Bounds()
        for inner, given in _numbers(value, key):
            if not bounds.holds(given):
                raise RequestError(f"{inner}={_shown(given)}: {_refusal(bounds, given)}")


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """The numbers in a value, each with its key. A number in a list has the list's key."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, key)


def _shown(value: float) -> str:
    """A number as text. Python prints no whole number of more than 4300 digits."""
    is_long = isinstance(value, int) and value.bit_length() > 2 * LARGEST.bit_length()
    return f"{'-' if value < 0 else ''}2^{int(value).bit_length()}" if is_long else str(value)


def _refusal(bounds: Bounds, value: float) -> str:
    """Why a number is refused."""
    text = str(bounds)
    if not is_usable(value):
        kind = "finite number" if isinstance(value, float) else f"number of at most {len(str(LARGEST))} digits"
        text = f"a {kind}, {text}" if text else f"a {kind}"
    return f"must be {text}{f'; {bounds.hint}' if bounds.hint else ''}"
