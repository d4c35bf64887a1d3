"""The keys of the schema by their dotted names, and the one that a user may have meant."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from ortlaunch.config.plugins import launcher_schemas
from ortlaunch.config.schema import GROUPS, Config, ModelConfig

_ALIKE = 0.7


def known_keys() -> list[str]:
    """Every dotted key of the schema, over all options of all groups."""
    return sorted(_types())


def has_key(node: type[Any], key: str, prefix: str) -> bool:
    """Whether one option of a group has a key.

    Args:
        node: the option's schema.
        key: the dotted key.
        prefix: the group's name and a dot.
    """
    return key in _types_of(node, prefix)


def meant_key(name: str) -> str | None:
    """The key that somebody means who calls it as other tools call their options, such as ``batch-size``."""
    name = name.replace("-", "_")
    keys = known_keys()
    if name in keys:
        return name
    by_name: dict[str, str] = {}
    # Of several with one name the run's own comes first, then the one that lies least deep.
    for key in sorted(keys, key=lambda key: (not key.startswith("train."), key.count("."), key)):
        by_name.setdefault(key.rpartition(".")[2], key)
    for names in (by_name, {key: key for key in keys}):
        if found := difflib.get_close_matches(name, names, n=1, cutoff=_ALIKE):
            return names[found[0]]
    return None


def is_switch(key: str) -> bool:
    """Whether a key is true or false."""
    return _types()[key] == "bool"


def schemas_of(group: str) -> dict[str, type[Any]]:
    """The schema of each option of a group, those of installed packages included."""
    return launcher_schemas() if group == "launcher" else GROUPS.get(group, {})


def _types() -> dict[str, str]:
    """The annotation of every key."""
    types = _types_of(Config, "") | _types_of(ModelConfig, "model.")
    for group in GROUPS:
        types.setdefault(group, "")
        for node in schemas_of(group).values():
            types |= _types_of(node, f"{group}.")
    return types


def _types_of(node: type[Any], prefix: str) -> dict[str, str]:
    types: dict[str, str] = {}
    for field in dataclasses.fields(node):
        types[prefix + field.name] = str(field.type)
        nested = field.default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            types |= _types_of(nested, f"{prefix}{field.name}.")
    return types
