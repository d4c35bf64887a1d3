"""The index of the runs: what the list shows of each, so that no run folder is read for a page."""

from __future__ import annotations

from ortlaunch.serve.index.indexer import Index
from ortlaunch.serve.service import Service


def make_runs(service: Service) -> Index:
    """Returns the index of a service."""
    return Index(service.engine, service.settings.roots)
