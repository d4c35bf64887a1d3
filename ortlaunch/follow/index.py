"""What need not be looked at again: runs that are over, as they were when they were last looked at.

Whether a run goes on takes some files of its folder, and one who has ten thousand runs waits for that, on a parallel
file system for minutes. A run that is over changes only by being launched again, which changes its folder's
modification time, and that comes with the listing. The index lies in the user's cache; without it all is as true,
and slower.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.user import user_cache
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.roots import keep


@dataclass
class Entry:
    """One run that is over."""

    changed: int
    """The folder's modification time for which this holds."""
    job_id: str | None = None
    row: dict[str, Any] | None = None
    """What there is to show of it, where it was read."""


class Index:
    """The index of the runs below one run root."""

    def __init__(self, root: Path) -> None:
        name = hashlib.sha256(str(root).encode()).hexdigest()[:16]
        self._file = user_cache() / "jobs" / f"{name}.json"
        self._entries = _read(self._file)
        self._changed = False

    def get(self, folder: RunFolder) -> Entry | None:
        """What is known of a run that is over; None where it must be looked at."""
        entry = self._entries.get(folder.place)
        return entry if entry is not None and entry.changed == folder.changed else None

    def put(self, folder: RunFolder, job_id: str | None, row: dict[str, Any] | None) -> None:
        """Keeps what was found of a run that is over."""
        self._entries[folder.place] = Entry(folder.changed, job_id, row)
        self._changed = True

    def save(self, folders: list[RunFolder]) -> None:
        """Writes the index, without runs that are there no more.

        Args:
            folders: all run folders below the root.
        """
        if not self._changed:
            return
        present = {folder.place for folder in folders}
        kept = {path: entry for path, entry in self._entries.items() if path in present}
        keep(self._file, json.dumps({path: [e.changed, e.job_id, e.row] for path, e in kept.items()}))


def _read(path: Path) -> dict[str, Entry]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: Entry(int(changed), job, row) for name, (changed, job, row) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
