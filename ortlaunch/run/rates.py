"""How fast runs of one kind were on this machine with each backend: small JSON files in the user's cache folder.

A kind is what two runs have in common whose speeds are the same; see `ortlaunch.launch.kind`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.files import replace_text
from ortlaunch.base.locks import exclusive
from ortlaunch.base.ownership import closed_to_others, why_foreign
from ortlaunch.base.reading import parse_json, read_bytes
from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import printable
from ortlaunch.base.user import user_cache

_OLDEST_SECONDS = 30 * 86400.0
"""An older rate is no longer believed, so that a backend that lost by a bad measurement is tried again."""
_UNSURE_SECONDS = 86400.0
"""The same for a rate of a busy machine, and for a backend that did not run: the reason may be gone, because a compiler
was installed, or code was changed that the model's module imports."""
_LONGEST_REASON = 200
_LARGEST = 64 << 10
_KEPT = 1000
"""Number of files that are kept; the oldest are deleted."""
_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Rate:
    """What is known of one backend for runs of one kind: its speed, or why it does not run."""

    step_seconds: float = 0.0
    """The median time of a step."""
    start_seconds: float = 0.0
    """The time from the launch to the end of the first step: imports, export, compilation, checks."""
    unfit: str = ""
    """Why it does not run, in one line; empty if it does."""

    def total(self, steps: int) -> float:
        """The seconds of a run of so many steps."""
        return self.start_seconds + steps * self.step_seconds


def read(kind: Mapping[str, Any]) -> dict[str, Rate]:
    """What is known of a kind of runs, by backend. Damaged, foreign and old entries count as missing."""
    return {name: rate for name, entry in _entries(_file(kind)).items() if (rate := _rate(entry)) is not None}


def note(kind: Mapping[str, Any], backend: str, rate: Rate, *, is_sure: bool) -> None:
    """Keeps what a run or a trial has found. It does nothing where the cache folder cannot be written.

    Args:
        kind: the kind of the run, as plain values.
        backend: the name of its backend.
        rate: what was found.
        is_sure: whether the machine was otherwise idle. Another rate does not take the place of such a one.
    """
    path = _file(kind)
    with suppress(OSError, ValueError), closed_to_others():
        path.parent.mkdir(parents=True, exist_ok=True)
        if why_foreign(path.parent) is not None:
            return
        # Of two runs that end at the same moment, neither writes the file without what the other has found.
        with exclusive(path.parent.with_name(".backend-rates.lock"), _WAIT_SECONDS):
            entries = {name: entry for name, entry in _entries(path).items() if _rate(entry) is not None}
            if not is_sure and entries.get(backend, {}).get("is_sure"):
                return
            reason = printable(" ".join(without_secrets(rate.unfit).split()))[:_LONGEST_REASON]
            entry = {**asdict(rate), "unfit": reason, "is_sure": is_sure and not reason, "time": time.time()}
            replace_text(path, json.dumps({"backends": entries | {backend: entry}}, indent=1) + "\n")
        files = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in files[:-_KEPT]:
            old.unlink(missing_ok=True)


def _file(kind: Mapping[str, Any]) -> Path:
    # The facts may hold a secret, such as the password of a data source. The file has their digest as its name.
    digest = hashlib.sha256(json.dumps(kind, sort_keys=True, default=str).encode()).hexdigest()
    return user_cache() / "backend-rates" / f"{digest[:32]}.json"


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file; none if it is damaged, or if another user may have written it."""
    if why_foreign(path.parent) is not None or why_foreign(path) is not None:
        return {}
    try:
        found = parse_json(read_bytes(path, _LARGEST))["backends"]
        return {str(name): dict(entry) for name, entry in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _rate(entry: Mapping[str, Any]) -> Rate | None:
    """The rate of an entry; None if it is damaged or old, or of another version."""
    try:
        rate = Rate(float(entry["step_seconds"]), float(entry["start_seconds"]), printable(entry["unfit"]))
        age = time.time() - float(entry["time"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    oldest = _OLDEST_SECONDS if entry.get("is_sure") is True else _UNSURE_SECONDS
    is_plain = all(math.isfinite(value) and value >= 0 for value in (rate.step_seconds, rate.start_seconds))
    return rate if is_plain and abs(age) < oldest and (rate.unfit or rate.step_seconds > 0) else None
