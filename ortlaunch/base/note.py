"""A note that outlives the process which wrote it, even one that a signal ends in native code."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

_BYTES = 8192


class Note:
    """One short text in a file that is mapped into memory, so that writing it takes no call to the kernel."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file, which is made or emptied.
        """
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _BYTES)

    def write(self, line: bytes) -> None:
        """Replaces the text; one that is too long is left out."""
        if len(line) < _BYTES:
            self._page[: len(line) + 1] = line + b"\0"


def read_note(path: Path) -> dict[str, Any]:
    """The JSON object that was noted last; empty where there is none."""
    try:
        found = json.loads(path.read_bytes().partition(b"\0")[0] or b"{}")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
