"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a line is; an error means that a run as it comes, ``backend=ort`` and MLflow, will fail."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    mend: str | None = None
    """The command that mends it."""
    by_hand: bool = False
    """The command needs a person: another user's rights, a choice, or another shell. ``--fix`` leaves it."""
