"""The keys ``eval.metrics`` and ``train.best``, read without torch and torchmetrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.base.targets import with_arguments

LOSS = "eval/loss"
_SHORT = {"f1": "f1score", "mse": "meansquarederror", "mae": "meanabsoluteerror"}
"""Names that people type, and torchmetrics' own without capitals."""
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


def class_of(name: str) -> str:
    """The class of torchmetrics that a name means.

    Raises:
        RequestError: there is none, or torchmetrics is not installed.
    """
    known, plain = _classes(), name.lower().replace("_", "")
    found = known.get(_SHORT.get(plain, plain)) or known.get(f"{plain}score")
    if found is None:
        close = nearest(plain, list(known))
        hint = f" Did you mean {close}?" if close else ""
        raise RequestError(f"eval.metrics={name}: torchmetrics has no metric of this name.{hint}")
    return found


@cache
def _classes() -> dict[str, str]:
    """The names of torchmetrics' classes by themselves without capitals. Importing it would import torch."""
    spec = find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        raise RequestError("eval.metrics needs torchmetrics: pip install 'ortlaunch[metrics]'")
    names: list[str] = []
    for file in (Path(spec.origin).with_name("text") / "__init__.py", Path(spec.origin)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if [one.id for one in targets if isinstance(one, ast.Name)] == ["__all__"]:
                    names += ast.literal_eval(node.value)
    return {name.lower(): name for name in names if name[0].isupper()}


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
