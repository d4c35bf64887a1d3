"""Estimates that were made before, in the user's cache: a file of JSON for each.

A file that others may have written, or that is damaged, is no estimate.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.files import PRIVATE, replace
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.reading import parse_json, read_bytes
from ortlaunch.base.user import user_cache
from ortlaunch.launch.memory.band import Band

_LARGEST = 1 << 16
_MOST_BYTES = 2**50
_MOST_CHANGES = 8
_MOST_FILES = 1000


@dataclass(frozen=True)
class Change:
    """A changed run that takes as many samples a step."""

    words: str
    """The keys to type."""
    machine: Band
    """Its memory on a machine."""


@dataclass(frozen=True)
class Estimate:
    """The memory of a run as it was traced, without what earlier runs have measured."""

    machine: Band
    """All workers of a machine."""
    worker: int
    """The likely peak of the first worker before it collects the weights at the end, in bytes."""
    changes: tuple[Change, ...] = ()
    """Changes that were traced, the smallest first."""
    is_probed: bool = False
    """Whether the figures of ONNX Runtime and torch.compile are from real steps, not factors on eager PyTorch's."""


def load(key: str) -> Estimate | None:
    """The estimate with this key; None if there is none that can be believed."""
    try:
        return from_json(read_own(_folder() / f"{key}.json", _LARGEST))
    except (KeyError, TypeError, ValueError):
        return None


def store(key: str, estimate: Estimate) -> None:
    """Keeps an estimate, with the changes of the one before if it has none; nothing if the cache cannot be written."""
    before = load(key)
    if before is not None and not estimate.changes and before.is_probed == estimate.is_probed:
        # Changes are traced only where a run does not fit, and under another limit it may not.
        estimate = dataclasses.replace(estimate, changes=before.changes)
    with suppress(OSError):
        write_own(_folder() / f"{key}.json", to_json(estimate))
        _prune(_folder())


def to_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain values."""
    changes = [{"words": one.words, "machine": _listed(one.machine)} for one in estimate.changes[:_MOST_CHANGES]]
    figures = {"machine": _listed(estimate.machine), "worker": estimate.worker}
    return {**figures, "changes": changes, "is_probed": estimate.is_probed}


def from_json(content: Any) -> Estimate:
    """The estimate that `to_json` made plain values of.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    changes = [Change(_words(one["words"]), _band(one["machine"])) for one in content["changes"][:_MOST_CHANGES]]
    is_probed = content.get("is_probed", False) is True
    return Estimate(_band(content["machine"]), count(content["worker"]), tuple(changes), is_probed)


def read_own(path: Path, largest: int) -> Any:
    """The JSON in a file that only the user can have written; None if it is missing, foreign or damaged.

    Args:
        path: the file.
        largest: its largest size in bytes.
    """
    if why_foreign(path.parent) is not None or why_foreign(path) is not None:
        return None
    try:
        return parse_json(read_bytes(path, largest, follow=False))
    except (OSError, ValueError):
        return None


def write_own(path: Path, content: Any) -> None:
    """Writes JSON for the owner alone.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace(path, json.dumps(content).encode(), PRIVATE)


def count(value: Any) -> int:
    """A number of bytes from a file.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not 0 < value < _MOST_BYTES:
        raise ValueError(f"{value!r} is no number of bytes")
    return value


def _folder() -> Path:
    return user_cache() / "estimates"


def _listed(band: Band) -> list[int]:
    return [band.low, band.middle, band.high]


def _band(value: Any) -> Band:
    low, middle, high = map(count, value)
    if not low <= middle <= high:
        raise ValueError("the figures are not in order")
    return Band(low, middle, high)


def _words(value: Any) -> str:
    """The keys of a change, which are shown to the user."""
    if not isinstance(value, str) or len(value) > 200 or not value.isascii() or not value.isprintable():
        raise ValueError("these are no keys")
    return value


def _prune(folder: Path) -> None:
    """Removes the oldest estimates of too many."""
    ages = sorted(_ages(folder))
    for _, path in ages[: max(0, len(ages) - _MOST_FILES)]:
        path.unlink(missing_ok=True)


def _ages(folder: Path) -> Iterator[tuple[float, Path]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                yield entry.stat().st_mtime, Path(entry.path)
