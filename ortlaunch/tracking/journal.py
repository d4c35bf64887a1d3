"""Public name of the journal, for programs: see `ortlaunch.run.journal`."""

from ortlaunch.run.journal import (
    Chunk,
    Event,
    Journal,
    Status,
    decoded,
    flatten,
    read_chunk,
    read_events,
)

__all__ = [
    "Chunk",
    "Event",
    "Journal",
    "Status",
    "decoded",
    "flatten",
    "read_chunk",
    "read_events",
]
