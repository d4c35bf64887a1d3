"""The keys of the schema by their dotted names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ortlaunch.config.launchers import launcher_schemas
from ortlaunch.config.schema import GROUPS, Config, ModelConfig, ScriptRun


def known_keys() -> list[str]:
    """Every dotted key of the schema, in all options of all groups."""
    return sorted(_types())


def has_key(node: type[Any], key: str, prefix: str) -> bool:
    """Whether an option of a group has a key.

    Args:
        node: the option's schema.
        key: the dotted key.
        prefix: the group's name and a dot.
    """
    return key in _types_of(node, prefix)


def is_free(key: str) -> bool:
    """Whether a key lies in a node that takes any key, such as ``model.params.width``."""
    return any(key.startswith(f"{free}.") for free, kind in _types().items() if kind.startswith("dict["))


def is_switch(key: str) -> bool:
    """Whether a key is a boolean."""
    return _types()[key] == "bool"


def schemas_of(group: str) -> Mapping[str, type[Any]]:
    """The schema of each option of a group, with the options of installed packages."""
    return launcher_schemas() if group == "launcher" else GROUPS.get(group, {})


def _types() -> dict[str, str]:
    """The annotation of every key."""
    types = _types_of(Config, "") | _types_of(ScriptRun, "") | _types_of(ModelConfig, "model.")
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
