"""Every key of the schema with what chooses its option, and values that it cannot take."""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ortlaunch.config import schema
from ortlaunch.config.bounds import LARGEST, Bounds, bounds_of
from ortlaunch.config.launchers import launcher_schemas
from ortlaunch.tracking import trackers

_NAMES = ("experiment", "name")
"""Keys that become a folder's name."""


@dataclass(frozen=True)
class Key:
    """A key as it is typed."""

    name: str
    hint: Any
    """Its type, as the schema has it."""
    bounds: Bounds
    chosen_by: tuple[str, ...] = ()
    """The words without which the configuration does not have the key."""


def all_keys() -> list[Key]:
    """The keys of the schema, of all options of all groups, and of the trackers."""
    nodes = {"": schema.Config, "train.": schema.TrainConfig, "eval.": schema.EvalConfig, "model.": schema.ModelConfig}
    found = [key for prefix, node in nodes.items() for key in _keys_of(node, prefix)]
    for group, options in schema.GROUPS.items():
        for option, node in (launcher_schemas() if group == "launcher" else options).items():
            plus = "+" if group in schema.OPTIONAL_GROUPS else ""
            found += _keys_of(node, f"{group}.", (f"{plus}{group}={option}",))
    for name in trackers.built_in_besides_mlflow():
        found += _keys_of(trackers.schema(name), f"trackers.{name}.", (f"tracking=[mlflow,{name}]",))
    return found


def _keys_of(node: type[Any], prefix: str, chosen_by: tuple[str, ...] = ()) -> list[Key]:
    hints = typing.get_type_hints(node)
    found = []
    for one in dataclasses.fields(node):
        hint = hints[one.name]
        if dataclasses.is_dataclass(hint) and prefix:
            found += _keys_of(typing.cast("type[Any]", hint), f"{prefix}{one.name}.", chosen_by)
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            found.append(Key(prefix + one.name, list[Any], Bounds(), chosen_by))
        elif not any(dataclasses.is_dataclass(part) for part in (hint, *typing.get_args(hint))):
            found.append(Key(prefix + one.name, hint, bounds_of(node, one.name) or Bounds(), chosen_by))
    return found


def bad_value(key: Key, chance: random.Random) -> str:
    """A value, as it is typed, that the key cannot take."""
    return chance.choice(_bad_values(key.hint, key))


def _bad_values(hint: Any, key: Key) -> list[str]:
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if isinstance(hint, types.UnionType):
        # null is a value of all of these.
        return [value for value in _bad_values(parts[0], key) if value != "null"]
    if typing.get_origin(hint) is list:
        if parts[0] is Any:
            return ["[5]", "[[a]]", "[{a:1}]", "{a:1}"]
        inner = [f"[{value}]" for value in _bad_values(parts[0], key)] if parts[0] is not str else ["[{a:1}]", "[[a]]"]
        return [*inner, "{a:1}"]
    if typing.get_origin(hint) is dict:
        return ["5", "text", "[a,b]"]
    if hint is bool:
        return ["maybe", "[true]", "{a:true}", "truee", "1.5", "''", "null"]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ["nosuchmember", "-1", "[a]", "{a:1}", "''"]
    if hint in (int, float):
        return _bad_numbers(hint, key.bounds)
    values = ["[a,b]", "{a:1}"]
    if key.name in _NAMES:
        values += ["a/b", "''", "'  '", "..", "x" * 300, "ö" * 150, "'a/../b'"]
    return values


def _bad_numbers(kind: type[Any], bounds: Bounds) -> list[str]:
    found = ["many", "''", "[1]", "{a:1}", "nan", "inf", "-inf", "9" * 10_000, "0x10", "1e400", "--1", "1_0x"]
    ends = ((bounds.least, -1), (bounds.above, 0), (bounds.most, 1), (bounds.below, 0))
    found += [str(kind(end) + further) for end, further in ends if end is not None]
    return [*found, "1.5", str(LARGEST + 1)] if kind is int else found


def misspelt(word: str, chance: random.Random) -> str:
    """A word with a slip of the keyboard."""
    at = chance.randrange(len(word))
    slips = (word[:at] + word[at + 1 :], word[:at] + "q" + word[at:], word[:at] + "z" + word[at + 1 :], f"{word}x")
    return chance.choice(slips)
