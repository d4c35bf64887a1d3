"""Opening an MLflow store so that it neither waits long, talks, nor breaks on its first use."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ortlaunch.base.locks import exclusive
from ortlaunch.config.tracking_uri import sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # The relay retries by itself and can be stopped while it waits.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_CHATTY = ("mlflow", "alembic", "urllib3")
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_FIRST_USE_SECONDS = 60


def open_client(uri: str, timeout_seconds: int) -> MlflowClient:
    """Connects to a store; makes and initialises an embedded one that does not exist yet.

    Args:
        uri: Absolute tracking URI.
        timeout_seconds: Longest wait for one answer of a server.

    Raises:
        Exception: Whatever MLflow or its libraries raise when there is no connection.
    """
    os.environ |= {**_ENVIRONMENT, _TIMEOUT: str(timeout_seconds)}
    from mlflow import MlflowClient

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with _first_use(uri):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


def quoted(text: str) -> str:
    """The text as a literal of MLflow's search language, which knows no escapes."""
    return f'"{text}"' if "'" in text else f"'{text}'"


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Within it a server may take longer to answer: it stores a large file before it says so."""
    before = os.environ.get(_TIMEOUT, "")
    os.environ[_TIMEOUT] = str(max(seconds, int(before or 0)))
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = before


@contextmanager
def _first_use(uri: str) -> Iterator[None]:
    """Lets one process at a time initialise a sqlite store: MLflow itself breaks the file when several do."""
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path.with_name(f".{path.name}.lock"), _FIRST_USE_SECONDS) as held:
        if not held:
            raise TimeoutError(f"another process has been opening {path} for {_FIRST_USE_SECONDS} s")
        yield
