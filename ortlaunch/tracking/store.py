"""Opens an MLflow store with short time-outs and without output, and protects the first use of a sqlite store."""

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
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # The relay retries itself, and can be stopped while it waits.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_CHATTY = ("mlflow", "alembic", "urllib3")
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_FIRST_USE_SECONDS = 60


def open_client(uri: str, timeout_seconds: int) -> MlflowClient:
    """Connects to a store. It creates and initializes an embedded store that does not exist yet.

    Args:
        uri: an absolute tracking URI.
        timeout_seconds: the longest wait for one answer of a server.

    Raises:
        Exception: MLflow or one of its libraries cannot connect.
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


@contextmanager
def _first_use(uri: str) -> Iterator[None]:
    """Lets only one process at a time initialize a sqlite store: several at once would break MLflow's file."""
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path.with_name(f".{path.name}.lock"), _FIRST_USE_SECONDS) as held:
        if not held:
            raise TimeoutError(f"another process has been opening {path} for {_FIRST_USE_SECONDS} s")
        yield
