"""Reports of ``ortlaunch estimate``, asked for as a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.cli import ortlaunch


def estimated(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """The report of an estimate with these keys, which ends with this exit code."""
    result = ortlaunch(folder, "estimate", *words, "--format=json")
    assert result.returncode == code, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found
