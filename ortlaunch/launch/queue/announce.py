"""Sends what is in some journals to MLflow, once: ``python -m ortlaunch.launch.queue.announce FOLDER ...``.

That is how runs, and the sweep that they belong to, stand in MLflow while they are still in the queue.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.tracking import destination
from ortlaunch.tracking.relay import RelayResult
from ortlaunch.tracking.relay import sync as send_journal

TRACKING_URI = "ORTLAUNCH_TRACKING_URI"
"""Variable with the tracking URI where it holds a password, which stands in no file."""


def tracking_of(folder: Path) -> MlflowConfig | None:
    """Where a run's or a sweep's journal goes, with the password that its folder does not hold; None for nowhere."""
    try:
        tracking = destination.tracking_of(folder)
    except RequestError:
        return None  # Without MLflow.
    return dataclasses.replace(tracking, uri=os.environ.get(TRACKING_URI) or tracking.uri)


def send(folder: Path) -> RelayResult | None:
    """Sends a run's or a sweep's journal; None where it goes nowhere."""
    tracking = tracking_of(folder)
    return send_journal(folder, tracking) if tracking is not None else None


def main() -> None:
    """Runs the command line; prints MLflow's id of the first and how many of all are not there yet."""
    results = [result for name in sys.argv[1:] if (result := send(Path(name))) is not None]
    for result in results:
        if result.message:
            print(result.message, file=sys.stderr)
    missing = sum(not result.sent for result in results)
    parts = [f"mlflow run {result.mlflow_run_id}" for result in results[:1] if result.sent]
    parts += [f"({missing} not yet sent: the job will)"] if missing else []
    print(" ".join(parts))


if __name__ == "__main__":
    main()
