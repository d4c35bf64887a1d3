"""The files of a run folder, by name."""

from __future__ import annotations

from pathlib import Path

STOP_FILE, STOPPED_FILE, DONE_FILE = "STOP", "stopped.json", "done.json"
"""Files in the run folder: the request to stop, where the run then stopped, and that all its steps are done."""

HEALTH = "health"
"""Folder in the run folder where each worker shows that it makes progress."""

WORKERS_LOCK = ".workers.lock"
"""File in the run folder that every worker holds a shared lock on while it lives."""

ARTIFACT_FOLDER = "ortlaunch"
"""Folder of a run's artifacts in MLflow that takes what says what ran."""


def stop_word(run_dir: Path) -> str | None:
    """First word of a run's STOP file, which says whose will it is, empty if it holds none; None without the file."""
    try:
        return next(iter((run_dir / STOP_FILE).read_text(encoding="utf-8", errors="replace").split()), "")
    except OSError:
        return None
