"""Makes and opens an MLflow store, with short time-outs and without output."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ortlaunch.base.locks import exclusive
from ortlaunch.config.tracking_uri import sqlite_path, sqlite_uri
from ortlaunch.tracking import sqlite_store, store_template
from ortlaunch.tracking.sqlite_store import State, look

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
WAIT_SECONDS = 120.0
"""How long one process waits for another one that makes the store. On a busy machine it takes up to 40 seconds."""
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
"""The port of each kind of database server where a URI names none."""


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
        ensure(path)
    quiet_mlflow()
    os.environ[_TIMEOUT] = str(timeout_seconds)
    _meet_database(uri, timeout_seconds)
    return connect(uri)


def _meet_database(uri: str, timeout_seconds: int) -> None:
    """Connects once to a database server, with our time-out and without MLflow's ten attempts.

    MLflow sets no time-out for databases, and it waits 100 s in all between its attempts. A wrong password is tried
    again too. Here callers decide about further attempts, as with an MLflow server.

    Raises:
        OSError: the server cannot be reached in time.
    """
    parts = urlsplit(uri)
    port = _PORTS.get(parts.scheme.partition("+")[0])
    # Without a host the driver takes a socket or a file of its own; several hosts are the driver's matter.
    if port is None or not parts.hostname or "," in parts.netloc:
        return
    with socket.create_connection((parts.hostname, parts.port or port), timeout=timeout_seconds):
        pass
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 1


def ensure(path: Path) -> None:
    """Makes the store if there is none. Several processes may do so at once; all of them get the same store.

    Raises:
        RequestError: the store is half made or outdated.
        OSError: the store cannot be made.
        sqlite3.Error: as `sqlite_store.look` does.
        TimeoutError: another process has been making it for `WAIT_SECONDS`.
    """
    if look(path).state is State.ABSENT:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_name(f".{path.name}.lock"), WAIT_SECONDS) as held:
            if not held:
                raise TimeoutError(f"another process has been making {path} for {WAIT_SECONDS:.0f} s")
            if look(path).state is State.ABSENT:
                _make(path)
    sqlite_store.check(path)


def _make(path: Path) -> None:
    """Makes a store under another name, as a copy of the template where one fits, and gives it its own name."""
    new = path.with_name(f".{path.name}.new")
    revision = sqlite_store.newest()
    # What a process left that was ended while it made the store.
    _remove(new)
    try:
        if revision is None or not store_template.copy_to(new, revision):
            _remove(new)
            _migrate(new)
            if revision is not None:
                store_template.keep(new, revision)
        os.replace(new, path)
    finally:
        _remove(new)


def _migrate(path: Path) -> None:
    """Lets MLflow make a store that no other process knows of."""
    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    quiet_mlflow()  # Importing MLflow sets the level of its logger.
    if "'" in str(Path.cwd()):
        # MLflow writes this folder into a statement of SQL as it is. As a URI it holds no quotation mark.
        SqlAlchemyStore(sqlite_uri(path).replace("sqlite:", "sqlite+pysqlite:", 1), (Path.cwd() / "mlruns").as_uri())
    connect(sqlite_uri(path))


def _remove(path: Path) -> None:
    """Removes a database and the files that SQLite keeps beside it."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


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
