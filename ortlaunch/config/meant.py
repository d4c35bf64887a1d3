"""Guesses which key a user meant by an unknown one: by other tools' names, by its words and by its spelling."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ortlaunch.base.nearest import nearest
from ortlaunch.config.keys import has_key, known_keys, schemas_of
from ortlaunch.config.schema import GROUPS
from ortlaunch.config.synonyms import FILLERS, KEYS, WORDS

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


def meant_keys(name: str) -> list[str]:
    """The keys that a name may stand for, the likeliest first; empty if no guess is good enough.

    Args:
        name: an unknown key as the user typed it, such as ``launcher.workers``, ``learning-rate`` or ``train.stpes``.

    Returns:
        At most two, each a key of the schema, a group, ``model.params.NAME`` or ``KEY=VALUE``.
    """
    asked = _asked(name)
    if asked.plain in known_keys():
        return [asked.plain]
    # A model's own parameters are not in the schema, so the user may always mean one of them.
    anywhere = (_a_model_parameter,) if asked.group == "model" else (_by_last_part, _by_words, _by_spelling)
    for guess in (_in_its_group, _by_table, *anywhere):
        if found := guess(asked):
            return found[:_MANY]
    return []


def meant_key(name: str) -> str | None:
    """The likeliest of `meant_keys`, such as ``train.batch_size`` for ``batch-size``."""
    return next(iter(meant_keys(name)), None)


@dataclass(frozen=True)
class _Asked:
    """The parts of an unknown key, such as those of ``--launchr.env.nccl-debug``."""

    plain: str
    """The whole key in the schema's style: ``launchr.env.nccl_debug``."""
    group: str
    """The group or node that it begins with, spelt right: ``launcher``; empty without one."""
    below: str
    """What follows the group: ``env.nccl_debug``; the whole key without a group."""

    @property
    def last(self) -> str:
        """The last part: ``nccl_debug``."""
        return self.below.rpartition(".")[2]


def _asked(name: str) -> _Asked:
    plain = _plain(name)
    group = _group_of(plain)
    return _Asked(plain, group, plain.partition(".")[2] if group else plain)


def _plain(name: str) -> str:
    """The name in the schema's style: ``--maxSteps`` and ``max-steps`` become ``max_steps``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-+"))
    return snake.replace("-", "_").lower()


def _group_of(plain: str) -> str:
    """The group or node that a dotted name begins with, which may be misspelt; empty without one."""
    first, dot, _ = plain.partition(".")
    if not dot:
        return ""
    groups = _groups()
    if first in groups:
        return first
    if found := _closest(first, groups):
        return found
    return WORDS.get(first, "") if WORDS.get(first) in groups else ""


def _groups() -> list[str]:
    return sorted({key.partition(".")[0] for key in known_keys() if "." in key} | set(GROUPS))


def _in_its_group(asked: _Asked) -> list[str]:
    """Finds a key whose group is misspelt or is not followed by a dot: ``trian.steps``, ``train_steps``."""
    keys = known_keys()
    if asked.group and f"{asked.group}.{asked.below}" in keys:
        return [f"{asked.group}.{asked.below}"]
    found = [key for key in keys if "." in key and key.replace(".", "_") == asked.plain.replace(".", "_")]
    # A user chooses an option by its group: optimizer=sgd, not optimizer.name=sgd.
    return [key.removesuffix(".name") if key.removesuffix(".name") in GROUPS else key for key in found]


def _by_table(asked: _Asked) -> list[str]:
    """Finds the keys that another tool calls by this name. A key of the same group that has its words comes first."""
    found = KEYS.get(asked.plain) or KEYS.get(asked.below) or ()
    inside = [key for key in found if asked.group and key.startswith(f"{asked.group}.")]
    if asked.group and not inside and _with_words(asked.below, asked.group):
        return []
    return inside or list(found)


def _a_model_parameter(asked: _Asked) -> list[str]:
    """Finds a misspelt key of the group, else takes a parameter one level too high: ``model.n_layer``."""
    return _spelt_in(asked.group, asked.below) or [f"model.params.{asked.below}"]


def _by_last_part(asked: _Asked) -> list[str]:
    """Finds the same name in another group. A single word after another tool's group is too vague: ``amp.mode``."""
    if not asked.group and "." in asked.plain and "_" not in asked.last:
        return []
    found = [key for key in known_keys() if key.rpartition(".")[2] == asked.last]
    return _nearest_group_first(found, asked.group)[:1] if len(found) <= _MANY else []


def _by_words(asked: _Asked) -> list[str]:
    """Finds keys that have all words of the name, or words that begin with them: in its group, else in any."""
    inside = _with_words(asked.below, asked.group) if asked.group else []
    words = asked.last if "_" in asked.last else asked.below
    return inside or _nearest_group_first(_with_words(words, ""), asked.group)


def _by_spelling(asked: _Asked) -> list[str]:
    """Finds keys, and other tools' names for keys, with a similar spelling: in the group first, then anywhere."""
    if found := _spelt_in(asked.group, asked.below):
        return found
    names: dict[str, tuple[str, ...]] = {key: (key,) for key in known_keys() if "." not in key}
    for key in _nearest_group_first([key for key in known_keys() if "." in key], asked.group):
        names.setdefault(key.rpartition(".")[2], (key,))
    names = KEYS | names
    closest = _closest(asked.last, list(names))
    return list(names[closest]) if closest else []


def _spelt_in(group: str, below: str) -> list[str]:
    """The key of a group whose part below the group has a similar spelling."""
    names = [key.partition(".")[2] for key in known_keys() if group and key.startswith(f"{group}.")]
    closest = _closest(below, names)
    return [f"{group}.{closest}"] if closest else []


def _with_words(name: str, group: str) -> list[str]:
    """The keys of a group, or of all groups, that have all words of a name and the fewest other words."""
    words = _words(name)
    sizes: dict[str, int] = {}
    for key in known_keys():
        if words and "." in key and key.startswith(group):
            of_key = _words(key.rpartition(".")[2])
            if all(any(_begins(word, other) for other in of_key) for word in words):
                sizes[key] = len(of_key)
    fewest = min(sizes.values(), default=0)
    found = [key for key, size in sizes.items() if size == fewest]
    return found if len(found) <= _MANY else []


def _words(name: str) -> set[str]:
    """The words of a name without fillers, with one word for each group of synonyms."""
    return {WORDS.get(word, word) for word in re.split(r"[._]", name)} - FILLERS - {""}


def _begins(word: str, other: str) -> bool:
    """Whether the first word is the other one's beginning, or the two differ only by a plural s."""
    return word.removesuffix("s") == other.removesuffix("s") or (len(word) >= 3 and other.startswith(word))


def _nearest_group_first(keys: list[str], group: str) -> list[str]:
    """Sorts keys by likelihood: by the similarity of their group, then those of `train`, then the least nested."""

    def rank(key: str) -> tuple[float, bool, int, str]:
        alike = difflib.SequenceMatcher(None, group, key.partition(".")[0]).ratio() if group else 0.0
        return (-alike, not key.startswith("train."), key.count("."), key)

    return sorted(keys, key=rank)


def _closest(name: str, names: list[str]) -> str | None:
    """The name with the most similar spelling. Of several hundred keys, only those of about the same length count."""
    return nearest(name, [other for other in names if abs(len(other) - len(name)) <= _LONGER])
