"""The journal's public interface for programs, which writes events and reads them as dictionaries.

ortlaunch itself uses typed events: see `ortlaunch.run.events`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ortlaunch.run import journal
from ortlaunch.run.events import Status, as_dict
from ortlaunch.run.journal import Journal, flatten

__all__ = ["Event", "Journal", "Status", "flatten", "read_events"]

Event = dict[str, Any]
"""``{"event": KIND, "t": MILLISECONDS, …}``"""


def read_events(path: Path, offset: int) -> tuple[list[Event], int]:
    """Reads all complete lines from byte `offset` on.

    A last line without a newline is left for the next call. A line that cannot be parsed is skipped and logged.

    Returns:
        The events, and the offset for the next call.
    """
    events, position = journal.read_events(path, offset)
    return [as_dict(event) for event in events], position
