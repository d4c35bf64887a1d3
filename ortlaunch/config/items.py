"""Checks the items of lists and dictionaries, whose types OmegaConf does not check when a whole list is given."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

from ortlaunch.base.errors import RequestError

_NAMES = {str: "text", int: "a whole number"}


def check_items(node: Any, prefix: str = "") -> None:
    """Checks that every item is of the type that the schema has for it.

    Args:
        node: an instance of a dataclass of the schema.
        prefix: the dotted name of the node with a dot at its end; empty for the whole configuration.

    Raises:
        RequestError: an item is of another type, such as a dictionary in a list of texts.
    """
    for name, hint in _hints(type(node)).items():  # type: ignore[arg-type]
        value, key = getattr(node, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            check_items(value, f"{key}.")
            continue
        for inner, item, kind in _items(value, hint, key):
            if not isinstance(item, kind) or isinstance(item, bool):
                raise RequestError(f"{inner}={item}: each item must be {_NAMES.get(kind, kind.__name__)}")


@functools.cache
def _hints(node: Any) -> dict[str, Any]:
    """The types of a dataclass's fields. Those of an installed package may not be resolvable here."""
    try:
        hints = typing.get_type_hints(node)
    except NameError:
        return {}
    return {one.name: hints[one.name] for one in dataclasses.fields(node)}


def _items(value: Any, hint: Any, key: str) -> Iterator[tuple[str, Any, type[Any]]]:
    """The items of a list or dictionary with their keys and types. Items of any type are left out."""
    parts = typing.get_args(hint)
    if not parts or parts[-1] is Any:
        return
    if isinstance(value, list) and isinstance(parts[0], type):
        yield from ((key, item, parts[0]) for item in value)
    elif isinstance(value, dict) and isinstance(parts[1], type):
        yield from ((f"{key}.{name}", item, parts[1]) for name, item in value.items())
