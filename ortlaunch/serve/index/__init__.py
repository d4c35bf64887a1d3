"""The index of the runs: what the list shows of each, so that no run folder is read for a page."""

from __future__ import annotations

from ortlaunch.base.text import counted
from ortlaunch.serve.database import open_database
from ortlaunch.serve.index.indexer import Index
from ortlaunch.serve.service import Service
from ortlaunch.serve.settings import Settings


def make_runs(service: Service) -> Index:
    """Returns the index of a service."""
    return Index(service.engine, service.settings.roots)


def rebuild(settings: Settings) -> str:
    """Makes the index anew from the run folders; returns what to say about it."""
    engine = open_database(settings.database)
    try:
        runs = Index(engine, settings.roots).rebuild()
    finally:
        engine.dispose()
    return f"the index was made anew: {counted(runs, 'run')}"
