"""Opens an MLflow store with short time-outs and without output."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ortlaunch.config.tracking_uri import sqlite_path
from ortlaunch.tracking import sqlite_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # The relay retries itself, and can be stopped while it waits.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_CHATTY = ("mlflow", "alembic", "urllib3")
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"


def open_client(uri: str, timeout_seconds: int) -> MlflowClient:
    """Connects to a store. It creates and initializes an embedded store that does not exist yet.

    Args:
        uri: an absolute tracking URI.
        timeout_seconds: the longest wait for one answer of a server.

    Raises:
        RequestError: the store is half made, or does not fit the installed MLflow.
        Exception: MLflow or one of its libraries cannot connect.
    """
    path = sqlite_path(uri)
    if path is not None:
        sqlite_store.ensure(path)
    quiet_mlflow()
    os.environ[_TIMEOUT] = str(timeout_seconds)
    return connect(uri)


def quiet_mlflow() -> None:
    """Keeps MLflow from sending telemetry, from writing to the terminal and from repeating requests."""
    os.environ |= _ENVIRONMENT
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def connect(uri: str) -> MlflowClient:
    """Connects to a store that exists, or lets MLflow make one at this very place."""
    from mlflow import MlflowClient

    quiet_mlflow()  # Importing MLflow sets the level of its logger.
    if uri.startswith("sqlite:///") and "%" in uri:
        # MLflow takes what follows "sqlite:///" for a path and makes its folder, but not if a driver is named.
        uri = uri.replace("sqlite:", "sqlite+pysqlite:", 1)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.search_experiments(max_results=1)
    return client


def quoted(text: str) -> str:
    """The text as a literal of MLflow's search language, which has no escape sequences."""
    return f'"{text}"' if "'" in text else f"'{text}'"


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Raises the time-out within the context, because a server answers only after it has stored a large file."""
    before = os.environ.get(_TIMEOUT, "")
    os.environ[_TIMEOUT] = str(max(seconds, int(before or 0)))
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = before
