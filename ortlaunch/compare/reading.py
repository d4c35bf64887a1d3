"""Opens a store for reading; nothing is created, and errors name the store without its credentials."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted, scrubbed
from ortlaunch.config.tracking_uri import check_uri, sqlite_path
from ortlaunch.tracking import sqlite_store
from ortlaunch.tracking.forward import cause_of
from ortlaunch.tracking.store import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TIMEOUT_SECONDS = 30


@contextmanager
def opened(uri: str) -> Iterator[MlflowClient]:
    """Yields a client of the store at an absolute tracking URI.

    Raises:
        RequestError: the store does not exist or cannot be read.
    """
    check_uri(uri)
    _check_database(uri)
    try:
        yield open_client(uri, _TIMEOUT_SECONDS)
    except RequestError as error:
        raise RequestError(f"{redacted(uri)}: {scrubbed(str(error), uri)}") from None
    except Exception as error:
        text = cause_of(error, lambda said: scrubbed(said, uri))
        raise RequestError(
            f"cannot read the MLflow store {redacted(uri)}: {text} (another store: --uri, or MLFLOW_TRACKING_URI)"
        ) from None


def _check_database(uri: str) -> None:
    """Refuses a missing, half-made or foreign database: MLflow would create the first and change the others."""
    path = sqlite_path(uri)
    if path is None:
        return
    if not path.is_file():
        raise RequestError(f"there is no MLflow store at {path}: start a run first, or name another store by --uri")
    try:
        sqlite_store.check(path)
        is_store = sqlite_store.look(path).state not in (sqlite_store.State.ABSENT, sqlite_store.State.FOREIGN)
    except sqlite3.Error as error:
        raise RequestError(f"{path} is no MLflow store ({error}): name another one by --uri") from None
    if not is_store:
        raise RequestError(f"{path} is no MLflow store: name another one by --uri")
