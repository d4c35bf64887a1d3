"""The keys ``eval.metrics`` and ``train.best``, read without torch and torchmetrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import with_arguments

LOSS = "eval/loss"
_DIRECTIONS = {"max": True, "min": False}


@dataclass(frozen=True)
class Wanted:
    """A metric of the request."""

    name: str
    """As typed, without the module."""
    target: str | None
    """``module:name`` of the user's own; None for torchmetrics'."""
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"eval.metrics={self.target or self.name}"


def wanted(entries: Sequence[Any]) -> list[Wanted]:
    """The metrics that ``eval.metrics`` names, looked at without torchmetrics.

    Raises:
        RequestError: an entry is neither a name nor a mapping with one, or two have the same name.
    """
    found = []
    for entry in entries:
        name, arguments = with_arguments(entry, "eval.metrics", "name")
        if not re.fullmatch(r"\w+|[\w.]+:[\w.]+", name):
            raise RequestError(
                f"eval.metrics: {entry!r} is no metric: give a name of torchmetrics (accuracy), one with arguments "
                "({name: accuracy, top_k: 5}), or your own as module:Class"
            )
        shown = str(arguments.pop("as", name.rpartition(":")[2]))
        found.append(Wanted(shown, name if ":" in name else None, arguments | ({} if ":" in name else {"name": name})))
    for one in found:
        if [other.name for other in found].count(one.name) > 1:
            raise RequestError(f"eval.metrics has two with the name {one.name}: give one of them another by as: NAME")
    return found


@dataclass(frozen=True)
class Best:
    """Which value of an evaluation makes the best checkpoint."""

    key: str
    higher: bool | None
    """Whether a higher value is better; None where the metric says so."""


def best_of(text: str | None) -> Best:
    """What ``train.best`` names; `eval/loss`, the lower the better, for null.

    Raises:
        RequestError: it is no name of a value with ``:max`` or ``:min`` or nothing behind it.
    """
    key, _, direction = (text or LOSS).partition(":")
    if not key.startswith("eval/") or direction not in ("", *_DIRECTIONS):
        raise RequestError(f"train.best={text}: give a value of the evaluation, as eval/accuracy or eval/likeness:max")
    return Best(key, _DIRECTIONS.get(direction, False if key == LOSS else None))
