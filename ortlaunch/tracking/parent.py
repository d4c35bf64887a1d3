"""The MLflow run under which the runs of a sweep stand."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.config.schema import MlflowConfig
from ortlaunch.tracking.forward import Forwarder, load_state

PARENT_TAG = "mlflow.parentRunId"


class ParentUnknown(Exception):
    """The parent run could not be created now; it is tried again."""


def parent_id(folder: Path, cfg: MlflowConfig) -> str | None:
    """MLflow's id of a sweep's parent run, which is created if nobody has yet.

    Args:
        folder: the sweep's folder.
        cfg: the store.

    Returns:
        None if the folder is gone: the run then stands alone.

    Raises:
        ParentUnknown: the store cannot be reached, or another process is creating it.
    """
    if not (folder / "journal.jsonl").is_file():
        return None
    if known := load_state(folder, cfg.uri).mlflow_run_id:
        return known
    forwarder = Forwarder(folder, cfg)
    try:
        forwarder.try_step(final=False)
    finally:
        forwarder.close()
    if known := load_state(folder, cfg.uri).mlflow_run_id:
        return known
    raise ParentUnknown(f"the run of the sweep {folder}: {forwarder.last_error or 'not yet there'}")
