"""What runs on this machine have measured of each backend: small JSON files in the user's cache folder.

One file is about runs of one kind: the same model, shapes, trainer, precision, workers, machine and versions. Whatever
a file holds, it decides at most which backend a run begins with. The start check of ONNX Runtime is made anyway.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortlaunch.base.files import replace_text
from ortlaunch.base.locks import exclusive
from ortlaunch.base.ownership import closed_to_others, why_foreign
from ortlaunch.base.reading import parse_json, read_bytes
from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import printable
from ortlaunch.base.user import user_cache
from ortlaunch.trainer.auto.decision import BACKENDS, Near, Rate

_LARGEST = 64 << 10
"""The largest file that is read, in bytes; one has less than a hundredth of it."""
_LONGEST_REASON = 200
_OLDEST_SECONDS = 30 * 86400.0
"""An older rate is no longer believed, so that a backend that lost by a bad measurement is tried again."""
_UNSURE_SECONDS = 86400.0
"""The same for a rate of a busy machine or of the few steps of a trial, and for a backend that refused: the reason may
be gone, because a compiler was installed, or code was changed that the model's module imports."""
_LOCK = ".backend-rates.lock"
_WAIT_SECONDS = 2.0
_KEPT = 1000
"""Number of files that are kept; the oldest are deleted."""
_BUSY_PERCENT = 10.0
"""With this share of the machine's cores in use by others, a rate does not replace one of an idle machine."""
UNSURE_PERCENT = 100.0
"""Counts as that share for a rate of a few steps. It does not replace one of a whole run, and is replaced by one."""
_LONGEST_SECONDS = 1e6
_KEYS = ("step_seconds", "start_seconds", "tried_seconds", "unfit", "busy_percent", "time")
_LARGEST_NUMBER = 1e12
_AMOUNT = ("batch_size", "grad_accumulation")
"""Keys of the training node that say how much work a step has. Runs that differ in these and in the data are near."""


class Rates:
    """The rates of runs of one kind."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """
        Args:
            facts: what a rate depends on, as plain values; see `ortlaunch.trainer.auto.kind`.
        """
        train, data = dict(facts.get("train", {})), dict(facts.get("data", {}))
        self._work = math.prod(int(one) for one in (*(train.pop(key, 1) for key in _AMOUNT), data.get("seq_len", 1)))
        self._model = str(facts.get("model"))
        # The facts may hold a secret, such as the password of a data source. The file has digests as its name.
        self._alike = _digest({**facts, "train": train, "data": None})[:16]
        self.path = _folder() / f"{self._alike}-{_digest(facts)[:32]}.json"

    def read(self) -> dict[str, Rate]:
        """What is known, by backend. Damaged, foreign and old entries count as missing."""
        return _rates(_entries(_content(self.path)))

    def near(self) -> list[Near]:
        """What is known of runs that differ in the batch or the data alone."""
        found = []
        for path in sorted(self.path.parent.glob(f"{self._alike}-*.json")):
            content = _content(path) if path != self.path else {}
            work, rates = content.get("work", 0), _rates(_entries(content))
            if _is_number(work) and work >= 1 and rates:
                found.append(Near(rates, self._work / work))
        return found

    def note(self, backend: str, rate: Rate, *, busy_percent: float = 0.0) -> None:
        """Keeps what a run or a trial has found. It does nothing where the cache folder cannot be written.

        Args:
            backend: the backend.
            rate: what was found. Without `start_seconds` the earlier one stays.
            busy_percent: share of the machine's cores that other processes used meanwhile.
        """
        with suppress(OSError, ValueError):
            if why_foreign(self.path.parent) is not None:
                return
            with closed_to_others():
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # Of two runs that end at the same moment, neither writes the file without what the other has found.
            with exclusive(self.path.parent.with_name(_LOCK), _WAIT_SECONDS):
                entries = _entries(_content(self.path))
                if (entry := _replacing(entries.get(backend), rate, busy_percent)) is None:
                    return
                content = {"model": _one_line(self._model), "work": self._work, "backends": entries | {backend: entry}}
                with closed_to_others():
                    replace_text(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")
            _prune(self.path.parent)


def _replacing(earlier: dict[str, Any] | None, rate: Rate, busy_percent: float) -> dict[str, Any] | None:
    """The entry of a backend after a further measurement; None if the earlier one is better."""
    old = _rate(earlier)
    is_busy = earlier is None or _is_busy(earlier.get("busy_percent"))
    if old is not None and old.step_seconds is not None and not is_busy and not rate.unfit and _is_busy(busy_percent):
        return None
    start = rate.start_seconds if rate.start_seconds is not None or old is None else old.start_seconds
    entry = {
        "step_seconds": rate.step_seconds,
        "start_seconds": start,
        "unfit": _one_line(rate.unfit),
        "tried_seconds": rate.tried_seconds,
        "busy_percent": busy_percent,
        "time": time.time(),
    }
    return {key: value for key, value in entry.items() if value not in (None, "")}


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _content(path: Path) -> dict[str, Any]:
    """What a file holds; empty if it is damaged or another user may have written it."""
    if why_foreign(path.parent) is not None or why_foreign(path) is not None:
        return {}
    try:
        content = parse_json(read_bytes(path, _LARGEST))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _entries(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = content.get("backends")
    if not isinstance(found, dict):
        return {}
    # What is damaged or old is not carried into the next file either.
    return {name: _plain(found[name]) for name in BACKENDS if _rate(found.get(name)) is not None}


def _rates(entries: Mapping[str, Any]) -> dict[str, Rate]:
    return {name: rate for name, entry in entries.items() if (rate := _rate(entry)) is not None}


def _folder() -> Path:
    return user_cache() / "backend-rates"


def _rate(entry: Any) -> Rate | None:
    """The rate in an entry; None if it is damaged, old, or says nothing."""
    if not isinstance(entry, dict):
        return None
    values = {key: entry.get(key) for key in ("step_seconds", "start_seconds", "tried_seconds")}
    written, unfit = entry.get("time"), entry.get("unfit", "")
    if not all(value is None or _is_time(value) for value in values.values()) or not isinstance(unfit, str):
        return None
    if not isinstance(written, int | float) or not _is_number(written):
        return None
    oldest = _UNSURE_SECONDS if unfit or _is_busy(entry.get("busy_percent")) else _OLDEST_SECONDS
    if not -oldest < time.time() - written < oldest:
        return None
    rate = Rate(
        step_seconds=values["step_seconds"],
        start_seconds=values["start_seconds"],
        unfit=_one_line(unfit),
        tried_seconds=values["tried_seconds"] or 0.0,
    )
    return None if rate.step_seconds == 0 else rate


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key in _KEYS and (_is_number(value) or type(value) is str)}


def _is_number(value: Any) -> bool:
    # JSON has integers that no float can hold; a comparison takes them, and is false for NaN.
    return type(value) in (int, float) and abs(value) < _LARGEST_NUMBER


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _LONGEST_SECONDS


def _is_busy(percent: Any) -> bool:
    return _is_number(percent) and percent >= _BUSY_PERCENT


def _one_line(reason: str) -> str:
    """A reason in one line that cannot control the terminal."""
    text = printable(" ".join(without_secrets(reason).split()))
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _prune(folder: Path) -> None:
    paths = list(folder.glob("*.json"))
    if len(paths) > _KEPT:
        for path in sorted(paths, key=lambda one: one.stat().st_mtime)[: len(paths) - _KEPT]:
            path.unlink(missing_ok=True)
