"""Sends what is in some journals to MLflow, once: ``python -m ortlaunch.launch.slurm.announce FOLDER ...``."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from ortlaunch.errors import RequestError
from ortlaunch.launch.slurm.request import TRACKING_URI
from ortlaunch.tracking.relay import sync
from ortlaunch.tracking.sync import tracking_of


def send(folder: Path) -> str | None:
    """Sends a run's or a sweep's journal; returns MLflow's id of it, None where it is not all sent."""
    try:
        tracking = tracking_of(folder)
    except RequestError:
        return None  # Without MLflow.
    result = sync(folder, dataclasses.replace(tracking, uri=os.environ.get(TRACKING_URI) or tracking.uri))
    if result.message:
        print(result.message, file=sys.stderr)
    return result.mlflow_run_id if result.sent else None


def main() -> None:
    """Runs the command line."""
    first, *others = (send(Path(folder)) for folder in sys.argv[1:])
    missing = sum(one is None for one in (first, *others))
    parts = [
        f"mlflow run {first}" if first is not None else "",
        f"({missing} not yet sent: the jobs will)" * (missing > 0),
    ]
    print(" ".join(part for part in parts if part))


if __name__ == "__main__":
    main()
