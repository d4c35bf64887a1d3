"""Sends journals to MLflow once: ``python -m ortlaunch.launch.queue.announce FOLDER ...``.

This makes runs and their sweep visible in MLflow while they are still in the queue.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.tracking.destination import destinations_of
from ortlaunch.tracking.relay import RelayResult
from ortlaunch.tracking.relay import sync as send_journal
from ortlaunch.tracking.state import destination
from ortlaunch.tracking.trackers import MAIN


def destinations(folder: Path) -> list[Any]:
    """Returns the trackers of a run's or a sweep's journal, with passwords from the environment; empty for none."""
    try:
        return destinations_of(folder, environment=os.environ)
    except RequestError:
        return []  # The folder has no journal or no tracker.


def send(folder: Path) -> RelayResult | None:
    """Sends a run's or a sweep's journal; returns None if it has no tracker."""
    cfgs = destinations(folder)
    return send_journal(folder, *cfgs) if cfgs else None


def _announce(folder: Path) -> RelayResult | None:
    """Sends a journal only to trackers that list runs. The job sends it to the others."""
    cfgs = [cfg for cfg in destinations(folder) if destination(folder, cfg).tracker.lists_runs]
    return send_journal(folder, *cfgs) if cfgs else None


def _name(result: RelayResult) -> str:
    """Returns the run's name in its first tracker."""
    first = result.sinks[0]
    return f"mlflow run {first.mark}" if first.name == MAIN else first.where


def main() -> None:
    """Runs the command line. Prints MLflow's id of the first folder and how many folders were not sent."""
    results = [result for name in sys.argv[1:] if (result := _announce(Path(name))) is not None]
    for result in results:
        if result.message:
            print(result.message, file=sys.stderr)
    missing = sum(not result.sent for result in results)
    parts = [_name(result) for result in results[:1] if result.sent]
    parts += [f"({missing} not yet sent: the job will)"] if missing else []
    print(" ".join(parts))


if __name__ == "__main__":
    main()
