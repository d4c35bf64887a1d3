"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How serious a line is; with an error, a run with the defaults (MLflow among them) will fail."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    name: str
    level: Level
    text: str
    fix: str | None = None
    """The command that fixes the problem. It is a key of the JSON report."""
