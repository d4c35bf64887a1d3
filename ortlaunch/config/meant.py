"""Guesses which key a user meant by an unknown one: by the table of other tools' names, and by its spelling."""

from __future__ import annotations

import re

from ortlaunch.base.nearest import nearest
from ortlaunch.config.keys import has_key, known_keys, schemas_of
from ortlaunch.config.schema import GROUPS
from ortlaunch.config.synonyms import KEYS

_LONGER = 2
"""The largest difference in length of a misspelt name: ``memory`` is not a misspelt ``pin_memory``."""
_MANY = 2
"""If more keys than this fit equally well, there is no guess."""


def unknown_key(key: str) -> str:
    """The message for a key that the configuration does not have. It suggests a key, or the option that has the key."""
    group = key.partition(".")[0]
    if owners := _owners(key):
        return f"{key}: the chosen {group} has no such key; it belongs to {group}={', '.join(owners)}"
    meant = " or ".join(map(_with_options, meant_keys(key)))
    hint = f". Did you mean {meant}?" if meant else ""
    return f"{key}: no such key{hint} (all keys: ortlaunch --cfg job)"


def _owners(key: str) -> list[str]:
    """The options of a key's group that have the key."""
    group = key.partition(".")[0]
    return [name for name, node in schemas_of(group).items() if has_key(node, key, f"{group}.")]


def _with_options(key: str) -> str:
    """The key as text. If at most half of its group's options have it, their names follow."""
    group = key.partition(".")[0]
    owners = _owners(key)
    return f"{key} ({group}={', '.join(owners)})" if 0 < len(owners) <= len(schemas_of(group)) / 2 else key


def meant_key(name: str) -> str | None:
    """The likeliest of `meant_keys`, such as ``train.batch_size`` for ``batch-size``."""
    return next(iter(meant_keys(name)), None)


def meant_keys(name: str) -> list[str]:
    """The keys that a name may stand for, the likeliest first; empty if no guess is good enough.

    Args:
        name: an unknown key as the user typed it, such as ``launcher.workers``, ``learning-rate`` or ``train.stpes``.

    Returns:
        At most two, each a key of the schema, a group, ``model.params.NAME`` or ``KEY=VALUE``.
    """
    # --maxSteps and max-steps are max_steps.
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-+")).replace("-", "_").lower()
    keys = known_keys()
    groups = sorted({key.partition(".")[0] for key in keys if "." in key} | set(GROUPS))
    first, dot, rest = plain.partition(".")
    group = (first if first in groups else _closest(first, groups) or "") if dot else ""
    below = rest if group else plain
    if (key := f"{group}.{below}".lstrip(".")) in keys:
        return [key]
    joined = [key for key in keys if "." in key and key.replace(".", "_") == plain.replace(".", "_")]
    # A user chooses an option by its group: optimizer=sgd, not optimizer.name=sgd.
    if found := [key.removesuffix(".name") if key.removesuffix(".name") in GROUPS else key for key in joined]:
        return found[:_MANY]
    if found := list(KEYS.get(plain) or KEYS.get(below) or ()):
        return [key for key in found if group and key.startswith(f"{group}.")] or found
    inside = {key.partition(".")[2]: key for key in keys if group and key.startswith(f"{group}.")}
    if closest := _closest(below, list(inside)):
        return [inside[closest]]
    if group == "model":
        # A model's own parameters are not in the schema.
        return [f"model.params.{below}"]
    return _anywhere(below.rpartition(".")[2], is_vague="." in below and "_" not in below.rpartition(".")[2])


def _anywhere(last: str, *, is_vague: bool) -> list[str]:
    """The keys of all groups, and other tools' names for them, whose last part is this one or is spelt like it."""
    keys = known_keys()
    same = [key for key in keys if key.rpartition(".")[2] == last]
    if same and not is_vague:
        return sorted(same, key=lambda key: not key.startswith("train."))[:1] if len(same) <= _MANY else []
    names: dict[str, tuple[str, ...]] = {}
    for key in sorted(keys, key=lambda key: ("." in key, not key.startswith("train."), key.count("."), key)):
        names.setdefault(key.rpartition(".")[2], (key,))
    names = KEYS | names
    closest = _closest(last, list(names))
    return list(names[closest]) if closest else []


def _closest(name: str, names: list[str]) -> str | None:
    """The name with the most similar spelling. Of several hundred keys, only those of about the same length count."""
    return nearest(name, [other for other in names if abs(len(other) - len(name)) <= _LONGER])
