"""Where the journal of a run folder goes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, resolve_tracking, sqlite_path
from ortlaunch.run.run import Run


def tracking_of(run_dir: Path, uri: str | None = None) -> MlflowConfig:
    """Where a run folder's journal goes.

    Args:
        run_dir: The run folder.
        uri: Overrides what the run was started with.

    Raises:
        RequestError: If the folder holds no journal, or neither it nor `uri` names a store.
    """
    if not Run(run_dir).journal_file.is_file():
        raise RequestError(f"{run_dir} is no run folder: it has no journal.jsonl")
    node = _tracking_node(run_dir)
    known = {field.name for field in fields(MlflowConfig)} & node.keys() if node.get("name") == "mlflow" else set()
    values = {name: node[name] for name in known}
    if uri is not None:
        check_uri(uri, "--uri")
        if "artifacts" not in values and (database := sqlite_path(uri)):
            values["artifacts"] = str(database.with_name("mlartifacts"))
        values["uri"] = uri
    elif "uri" not in values:
        raise RequestError(f"{run_dir} was started without MLflow (tracking=none): name a store with --uri")
    cfg = MlflowConfig(**values)
    check_uri(cfg.uri)
    return resolve_tracking(cfg, Path.cwd())


def is_without_mlflow(run_dir: Path) -> bool:
    """Whether the run was started with tracking=none."""
    return _tracking_node(run_dir).get("name") == "none"


def _tracking_node(run_dir: Path) -> dict[str, Any]:
    node = Run(run_dir).settings().get("tracking")
    return node if isinstance(node, dict) else {}
