"""An index of runs that are over, so that their folders need not be read again.

To tell whether a run goes on, several files of its folder are read. With ten thousand runs on a parallel file system,
this takes minutes. A run that is over changes only when it is launched again. That changes its folder's modification
time, which the listing of folders contains. The index is in the user's cache. Without it, results are the same, but
slower.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
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
    """The folder's modification time for which this entry is valid."""
    job_id: str | None = None
    row: dict[str, Any] | None = None
    """The run's row, from `Row.as_dict`; None if it was not read."""


class Index:
    """The index of the runs below one run root."""

    def __init__(self, root: Path) -> None:
        name = hashlib.sha256(str(root).encode()).hexdigest()[:16]
        self._file = user_cache() / "jobs" / f"{name}.json"
        self._entries = _read(self._file)
        self._changed = False

    def get(self, folder: RunFolder) -> Entry | None:
        """Returns the entry of a run that is over; None if its folder must be read."""
        entry = self._entries.get(folder.place)
        return entry if entry is not None and entry.changed == folder.changed else None

    def put(self, folder: RunFolder, job_id: str | None, row: dict[str, Any] | None) -> None:
        """Stores the entry of a run that is over."""
        self._entries[folder.place] = Entry(folder.changed, job_id, row)
        self._changed = True

    def save(self, present: Collection[str]) -> None:
        """Writes the index, without runs whose folders are gone.

        Args:
            present: the paths of all run folders below the root.
        """
        if not self._changed:
            return
        kept = {path: entry for path, entry in self._entries.items() if path in present}
        keep(self._file, json.dumps({path: [e.changed, e.job_id, e.row] for path, e in kept.items()}))


def _read(path: Path) -> dict[str, Entry]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: Entry(int(changed), job, row) for name, (changed, job, row) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
