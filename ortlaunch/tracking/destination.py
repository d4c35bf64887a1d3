"""The trackers that the journal of a run folder is sent to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import is_hidden
from ortlaunch.config.hidden import restored
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, resolve_tracking, sqlite_path
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.state import Unusable


def destinations_of(run_dir: Path, uri: str | None = None, environment: Mapping[str, str] | None = None) -> list[Any]:
    """The configurations of the trackers that a run folder's journal is sent to.

    Args:
        run_dir: the run folder.
        uri: an MLflow store that replaces the one that the run was started with.
        environment: the variables with the credentials, which the folder does not hold; None takes this process's.

    Raises:
        RequestError: the folder has no journal, neither the folder nor `uri` names a tracker, or the folder's URI holds
            ``***`` instead of a password that the environment does not have.
    """
    run = Run(run_dir)
    run.require(run.journal_file)
    environment = os.environ if environment is None else environment
    main, others = _nodes(run_dir, environment)
    cfgs = [_of_node(name, node) for name, node in others.items()]
    values = _known_values(main) if main.get("name") == trackers.MAIN else {}
    if uri is not None or "uri" in values:
        cfgs.insert(0, _mlflow(values, uri))
    if not cfgs:
        raise RequestError(f"{run_dir} was started without MLflow (tracking=none): name a store with --uri")
    cfgs = [trackers.restored(cfg, environment) for cfg in cfgs]
    for cfg in cfgs:
        if isinstance(cfg, MlflowConfig) and is_hidden(cfg.uri):
            variable = trackers.find(trackers.MAIN).variable
            raise RequestError(
                f"{run_dir} holds {cfg.uri} without its password: set {variable} to the whole URI, or give it by --uri"
            )
    return cfgs


def is_without_trackers(run_dir: Path) -> bool:
    """Whether the run was started with tracking=none."""
    main, others = _nodes(run_dir)
    return main.get("name") == trackers.NONE and not others


def has_trackers(run_dir: Path) -> bool:
    """Whether the run folder's configuration names a tracker; False if the configuration cannot be read."""
    try:
        main, others = _nodes(run_dir)
    except RequestError:
        return False
    return main.get("name") == trackers.MAIN or bool(others)


def has_store(run_dir: Path) -> bool:
    """Whether the run folder's configuration names an MLflow store; False if the configuration cannot be read."""
    try:
        return bool(_nodes(run_dir)[0].get("name") == trackers.MAIN)
    except RequestError:
        return False


def _mlflow(values: dict[str, Any], uri: str | None) -> MlflowConfig:
    if uri is not None:
        check_uri(uri, "--uri")
        if "artifacts" not in values and (database := sqlite_path(uri)):
            values["artifacts"] = str(database.with_name("mlartifacts"))
        values["uri"] = uri
    cfg = MlflowConfig(**values)
    check_uri(cfg.uri)
    return resolve_tracking(cfg, Path.cwd())


def _known_values(node: dict[str, Any]) -> dict[str, Any]:
    return {name: node[name] for name in {field.name for field in fields(MlflowConfig)} & node.keys()}


def _of_node(name: str, node: Any) -> Any:
    """The typed configuration of a tracker; `Unusable` with the reason if the tracker cannot be configured here."""
    try:
        return trackers.configured(name, node if isinstance(node, dict) else {})
    except RequestError as error:
        return Unusable(name, str(error))


def _nodes(run_dir: Path, environment: Mapping[str, str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    config = restored(Run(run_dir).settings(), environment or {})
    main, others = config.get("tracking"), config.get("trackers")
    return main if isinstance(main, dict) else {}, others if isinstance(others, dict) else {}
